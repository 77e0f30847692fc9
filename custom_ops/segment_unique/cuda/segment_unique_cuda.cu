#include "segment_unique/cuda/segment_unique_cuda.h"

#include "common/launcher.cuh"
#include "segment_unique/cuda/segment_unique_cuda.cuh"

namespace fusedrec {
namespace segment_unique {
namespace {

struct Scratch {
  Scratch(void* memory, int64_t num_ids, int64_t num_segments) : carver(memory) {
    // The next three begin with all ones, which one fill writes.
    slots = carver.Take<uint32_t>(2 * num_ids);
    states = carver.Take<unsigned long long>(Tiles(num_ids));
    next_tile = carver.Take<unsigned>(1);
    filled_bytes = carver.bytes();
    splits = carver.Take<int64_t>(num_segments + 1);
    first = carver.Take<uint32_t>(num_ids);
    number = carver.Take<uint32_t>(num_ids + 1);
  }
  // One position more than there are ids: the number after the last one is their sum.
  static int64_t Tiles(int64_t num_ids) { return (num_ids + kNumberTile) / kNumberTile; }

  Carver carver;
  uint32_t *slots, *first, *number;
  unsigned long long* states;
  unsigned* next_tile;
  int64_t* splits;
  int64_t filled_bytes;
};

}  // namespace
}  // namespace segment_unique
}  // namespace fusedrec

int64_t fusedrec_segment_unique_scratch_bytes(int64_t num_ids, int64_t num_segments) {
  return fusedrec::segment_unique::Scratch(nullptr, num_ids, num_segments).carver.bytes();
}

int fusedrec_segment_unique(const int64_t* ids, const int64_t* segment_splits, int64_t num_ids, int64_t num_segments,
                            void* scratch, int64_t* unique_ids, int64_t* unique_splits, int32_t* inverse,
                            void* stream) {
  using namespace fusedrec;                   // NOLINT
  using namespace fusedrec::segment_unique;  // NOLINT
  if (num_ids < 0 || num_ids > kSegmentUniqueCudaMaxIds || num_segments > kSegmentUniqueCudaMaxSegments ||
      !SplitsAreSound(segment_splits, num_segments, num_ids)) {
    return kCudaInvalidValue;
  }
  if (num_ids == 0) return Fill(unique_splits, 0, (num_segments + 1) * sizeof(int64_t), stream);
  const Scratch at(scratch, num_ids, num_segments);
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.splits, segment_splits, num_segments + 1, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(at.slots, 0xff, at.filled_bytes, stream));
  FUSEDREC_LAUNCH(SegmentUniqueInsertKernel, BlocksFor(num_ids, kInsertTile), kThreads, 0, stream, ids, at.splits,
                  num_ids, num_segments, at.slots, at.first);
  FUSEDREC_LAUNCH(SegmentUniqueNumberKernel, static_cast<unsigned>(Scratch::Tiles(num_ids)), kThreads, 0, stream, ids,
                  num_ids, at.slots, at.first, at.number, unique_ids, at.states, at.next_tile);
  const int64_t threads = num_ids > num_segments ? num_ids : num_segments + 1;
  FUSEDREC_LAUNCH(SegmentUniqueInverseKernel, BlocksFor(threads, kThreads), kThreads, 0, stream, num_ids, at.first,
                  at.number, at.splits, num_segments, unique_splits, inverse);
  return LastError();
}
