// Kernels of fuse_ids; the idea stands in fuse_ids_cuda.h.
#pragma once

#include "common/pieces.cuh"
#include "fuse_ids/bag_scale.h"

namespace fusedrec {
namespace fuse_ids {

// row_splits of a ragged feature, among those of all.
struct RowsPiece {
  int64_t begin;
  const int64_t* row_splits;
  int64_t num_splits, num_ids, feature;
};

// Bags of a feature, among those of all.
struct BagsPiece {
  int64_t begin;
  const int64_t* row_splits;  // null: bags of bag_size ids
  int64_t first_id, bag_size;
  Combiner combiner;
};

constexpr unsigned kNoFeature = 0xffffffffu;

// *wrong, kNoFeature before, becomes the first feature whose row_splits do not run from 0 to num_ids, or decrease.
__global__ void __launch_bounds__(kPieceThreads)
    FuseIdsCheckKernel(const RowsPiece* __restrict__ pieces, int64_t count, int64_t num_splits, unsigned* wrong) {
  for (int64_t i = GlobalThread(); i < num_splits; i += static_cast<int64_t>(gridDim.x) * kPieceThreads) {
    const RowsPiece& piece = PieceOf(pieces, count, i);
    const int64_t row = i - piece.begin;
    bool is_sound = row == 0 ? piece.row_splits[0] == 0 : piece.row_splits[row - 1] <= piece.row_splits[row];
    if (row == piece.num_splits - 1) is_sound = is_sound && piece.row_splits[row] == piece.num_ids;
    if (!is_sound) atomicMin(wrong, static_cast<unsigned>(piece.feature));
  }
}

// Ends and scales of all bags. It follows row_splits, so it writes nothing where some are wrong.
__global__ void __launch_bounds__(kPieceThreads)
    FuseIdsBagsKernel(const BagsPiece* __restrict__ pieces, int64_t count, int64_t num_bags,
                      const unsigned* __restrict__ wrong, int64_t* __restrict__ bag_splits,
                      float* __restrict__ bag_scale) {
  if (*wrong != kNoFeature) return;
  for (int64_t g = GlobalThread(); g < num_bags; g += static_cast<int64_t>(gridDim.x) * kPieceThreads) {
    const BagsPiece& piece = PieceOf(pieces, count, g);
    const int64_t bag = g - piece.begin;
    const bool by_row = piece.row_splits != nullptr;
    const int64_t begin = by_row ? piece.row_splits[bag] : bag * piece.bag_size;
    const int64_t end = by_row ? piece.row_splits[bag + 1] : (bag + 1) * piece.bag_size;
    bag_splits[g + 1] = piece.first_id + end;
    bag_scale[g] = ScaleOfBag(piece.combiner, end - begin);
  }
}

}  // namespace fuse_ids
}  // namespace fusedrec
