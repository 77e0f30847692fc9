#include "fuse_ids/fuse_ids_cuda.h"

#include "common/pieces.cuh"
#include "common/launcher.cuh"

namespace fusedrec::fuse_ids {

struct RowsPiece {
  int64_t begin;
  const int64_t* row_splits;
  int64_t num_splits, num_ids, feature;
};

struct BagsPiece {
  int64_t begin;
  const int64_t* row_splits;  // null: bags of bag_size ids
  int64_t first_id, bag_size;
  Combiner combiner;
};

constexpr unsigned kNoFeature = 0xffffffffu;

// *wrong, kNoFeature before, becomes the first feature whose row_splits do not run from 0 to num_ids, or decrease.
FUSEDREC_KERNEL FuseIdsCheckKernel(const RowsPiece* __restrict__ pieces, int64_t count, int64_t num_splits,
                                   unsigned* wrong) {
  for (int64_t i = GlobalThread(); i < num_splits; i += GridThreads()) {
    const RowsPiece& piece = PieceOf(pieces, count, i);
    const int64_t row = i - piece.begin;
    bool is_sound = row == 0 ? piece.row_splits[0] == 0 : piece.row_splits[row - 1] <= piece.row_splits[row];
    if (row == piece.num_splits - 1) is_sound = is_sound && piece.row_splits[row] == piece.num_ids;
    if (!is_sound) atomicMin(wrong, static_cast<unsigned>(piece.feature));
  }
}

// Ends and scales of all bags. It follows row_splits, so it writes nothing where some are wrong.
FUSEDREC_KERNEL FuseIdsBagsKernel(const BagsPiece* __restrict__ pieces, int64_t count, int64_t num_bags,
    const unsigned* __restrict__ wrong, int64_t* __restrict__ bag_splits, float* __restrict__ bag_scale) {
  if (*wrong != kNoFeature) return;
  for (int64_t g = GlobalThread(); g < num_bags; g += GridThreads()) {
    const BagsPiece& piece = PieceOf(pieces, count, g);
    const int64_t bag = g - piece.begin;
    const bool by_row = piece.row_splits != nullptr;
    const int64_t begin = by_row ? piece.row_splits[bag] : bag * piece.bag_size;
    const int64_t end = by_row ? piece.row_splits[bag + 1] : (bag + 1) * piece.bag_size;
    bag_splits[g + 1] = piece.first_id + end;
    bag_scale[g] = ScaleOfBag(piece.combiner, end - begin);
  }
}

}  // namespace fusedrec::fuse_ids

#ifndef __CUDACC_RTC__
using namespace fusedrec;            // NOLINT
using namespace fusedrec::fuse_ids;  // NOLINT

int fusedrec_fuse_ids(const FusedrecFeature* features, int64_t num_features, int64_t num_ids, int64_t num_bags,
                      const FusedrecAllocator* memory, int64_t* fused, int64_t* bag_splits, float* bag_scale,
                      int32_t* wrong, void* stream) {
  *wrong = -1;
  std::vector<CopiedPiece> ids;
  std::vector<RowsPiece> rows;
  std::vector<BagsPiece> bags;
  int64_t id = 0, row = 0, bag = 0;
  for (int64_t f = 0; f < num_features; ++f) {
    const FusedrecFeature& of = features[f];
    const int64_t num_of_bags = of.bag_size > 0 ? of.num_ids / of.bag_size : of.num_splits - 1;
    ids.push_back({id, of.ids, fused + id});
    bags.push_back({bag, of.bag_size > 0 ? nullptr : of.row_splits, id, of.bag_size,
                    static_cast<Combiner>(of.combiner)});
    if (of.row_splits != nullptr) {
      rows.push_back({row, of.row_splits, of.num_splits, of.num_ids, f});
      row += of.num_splits;
    }
    id += of.num_ids;
    bag += num_of_bags;
  }

  const int64_t ragged = static_cast<int64_t>(rows.size());
  CopiedPiece* id_pieces;
  RowsPiece* row_pieces;
  BagsPiece* bag_pieces;
  unsigned* wrong_feature;
  ScratchMemory scratch(memory);
  FUSEDREC_TRY(scratch.Take({{&id_pieces, num_features}, {&row_pieces, ragged}, {&bag_pieces, num_features},
                              {&wrong_feature, 1}}));
  FUSEDREC_TRY(CopyToDevice(id_pieces, ids.data(), num_features, stream));
  FUSEDREC_TRY(CopyToDevice(row_pieces, rows.data(), ragged, stream));
  FUSEDREC_TRY(CopyToDevice(bag_pieces, bags.data(), num_features, stream));
  FUSEDREC_TRY(Fill(wrong_feature, 0xff, sizeof(unsigned), stream));
  FUSEDREC_TRY(Fill(bag_splits, 0, sizeof(int64_t), stream));
  FUSEDREC_LOOP(FuseIdsCheckKernel, row, stream, row_pieces, ragged, row, wrong_feature);
  FUSEDREC_LOOP(CopyPiecesKernel, num_ids, stream, id_pieces, num_features, num_ids);
  FUSEDREC_LOOP(FuseIdsBagsKernel, num_bags, stream, bag_pieces, num_features, num_bags, wrong_feature, bag_splits,
                bag_scale);
  FUSEDREC_TRY(LastError());
  if (ragged == 0) return kCudaSuccess;
  return CopyToHost(wrong, reinterpret_cast<const int32_t*>(wrong_feature), 1, stream);
}
#endif
