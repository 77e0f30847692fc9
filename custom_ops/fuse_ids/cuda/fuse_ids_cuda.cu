#include "fuse_ids/cuda/fuse_ids_cuda.h"

#include <vector>

#include "common/launcher.cuh"
#include "fuse_ids/cuda/fuse_ids_cuda.cuh"

namespace fusedrec {
namespace fuse_ids {
namespace {

constexpr int64_t kMost = (int64_t{1} << 31) - 1;

struct Scratch {
  Scratch(void* memory, int64_t num_features) : carver(memory) {
    ids = carver.Take<CopiedPiece>(num_features);
    rows = carver.Take<RowsPiece>(num_features);
    bags = carver.Take<BagsPiece>(num_features);
    wrong = carver.Take<unsigned>(1);
  }
  Carver carver;
  CopiedPiece* ids;
  RowsPiece* rows;
  BagsPiece* bags;
  unsigned* wrong;
};

bool IsSound(const FusedrecFeature& feature) {
  if (feature.num_ids < 0 || feature.num_ids > kMost || feature.combiner < 0 || feature.combiner > 2) return false;
  if (feature.row_splits != nullptr && (feature.num_splits < 1 || feature.num_splits > kMost)) return false;
  return feature.bag_size > 0 ? feature.num_ids % feature.bag_size == 0
                              : feature.bag_size == 0 && feature.row_splits != nullptr;
}

}  // namespace
}  // namespace fuse_ids
}  // namespace fusedrec

using namespace fusedrec;            // NOLINT
using namespace fusedrec::fuse_ids;  // NOLINT

int64_t fusedrec_fuse_ids_scratch_bytes(int64_t num_features) { return Scratch(nullptr, num_features).carver.bytes(); }

int fusedrec_fuse_ids(const FusedrecFeature* features, int64_t num_features, int64_t num_ids, int64_t num_bags,
                      void* scratch, int64_t* fused, int64_t* bag_splits, float* bag_scale, int32_t* wrong,
                      void* stream) {
  *wrong = -1;
  if (num_features < 0 || num_features > kMost || num_ids > kMost || num_bags > kMost) return kCudaInvalidValue;
  std::vector<CopiedPiece> ids;
  std::vector<RowsPiece> rows;
  std::vector<BagsPiece> bags;
  int64_t id = 0, row = 0, bag = 0;
  for (int64_t f = 0; f < num_features; ++f) {
    const FusedrecFeature& of = features[f];
    if (!IsSound(of)) return kCudaInvalidValue;
    const int64_t num_of_bags = of.bag_size > 0 ? of.num_ids / of.bag_size : of.num_splits - 1;
    if (of.num_ids > num_ids - id || num_of_bags > num_bags - bag) return kCudaInvalidValue;
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
  if (id != num_ids || bag != num_bags) return kCudaInvalidValue;

  const Scratch at(scratch, num_features);
  const int64_t ragged = static_cast<int64_t>(rows.size());
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.ids, ids.data(), num_features, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.rows, rows.data(), ragged, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.bags, bags.data(), num_features, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(at.wrong, 0xff, sizeof(unsigned), stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(bag_splits, 0, sizeof(int64_t), stream));
  if (ragged > 0) {
    FUSEDREC_LAUNCH(FuseIdsCheckKernel, LoopBlocks(row, kPieceThreads), kPieceThreads, 0, stream, at.rows, ragged, row,
                    at.wrong);
  }
  if (num_ids > 0) {
    FUSEDREC_LAUNCH(CopyPiecesKernel, LoopBlocks(num_ids, kPieceThreads), kPieceThreads, 0, stream, at.ids,
                    num_features, num_ids);
  }
  if (num_bags > 0) {
    FUSEDREC_LAUNCH(FuseIdsBagsKernel, LoopBlocks(num_bags, kPieceThreads), kPieceThreads, 0, stream, at.bags,
                    num_features, num_bags, at.wrong, bag_splits, bag_scale);
  }
  FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  if (ragged == 0) return kCudaSuccess;
  return CopyToHost(wrong, reinterpret_cast<const int32_t*>(at.wrong), 1, stream);
}
