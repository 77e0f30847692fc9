#include "rank_partition/cuda/rank_partition_cuda.h"

#include <algorithm>
#include <vector>

#include "common/launcher.cuh"
#include "rank_partition/cuda/rank_partition_cuda.cuh"

namespace fusedrec {
namespace rank_partition {
namespace {

constexpr int64_t kMaxIds = (int64_t{1} << 31) - 1;

struct Scratch {
  Scratch(void* memory, int64_t num_ids, int64_t num_segments, int64_t num_ranks) : carver(memory) {
    splits = carver.Take<int64_t>(num_segments + 1);
    counts = carver.Take<unsigned>(num_ranks * stable_split::Tiles(num_ids));
    before = carver.Take<unsigned>((num_segments + 1) * num_ranks);
    rank_begin = carver.Take<unsigned>(num_ranks + 1);
    totals = carver.Take<unsigned>(num_ranks + 1);  // the last one: misfit, so that one copy brings both
  }
  Carver carver;
  int64_t* splits;
  unsigned *counts, *before, *rank_begin, *totals;
};

struct UnpackScratch {
  UnpackScratch(void* memory, int64_t num_segments, int64_t num_ranks) : carver(memory) {
    const int64_t runs = num_segments * num_ranks;
    block_begin = carver.Take<int64_t>(num_ranks);
    headers = carver.Take<int64_t>(runs);
    run_begin = carver.Take<int64_t>(runs);
    run_to = carver.Take<int64_t>(runs);
  }
  Carver carver;
  int64_t *block_begin, *headers, *run_begin, *run_to;
};

}  // namespace
}  // namespace rank_partition
}  // namespace fusedrec

using namespace fusedrec;                  // NOLINT
using namespace fusedrec::rank_partition;  // NOLINT

int64_t fusedrec_rank_partition_scratch_bytes(int64_t num_ids, int64_t num_segments, int64_t num_ranks) {
  return Scratch(nullptr, num_ids, num_segments, num_ranks).carver.bytes();
}

int fusedrec_rank_partition(const int64_t* unique_ids, const int64_t* unique_splits, int64_t num_ids,
                            int64_t num_segments, int64_t num_ranks, int tfra_owner, int id_bits, void* scratch,
                            int64_t* message, int64_t message_size, int32_t* counts, int32_t* restore, void* stream) {
  const int64_t size = num_ids + num_ranks * num_segments;
  if (num_ranks < 1 || num_ranks > kRankPartitionCudaMaxRanks || size > kMaxIds || message_size < size ||
      !SplitsAreSound(unique_splits, num_segments, num_ids)) {
    return kCudaInvalidValue;
  }
  const Scratch at(scratch, num_ids, num_segments, num_ranks);
  const int64_t tiles = stable_split::Tiles(num_ids);
  const OwnerOf owner_of{unique_ids, static_cast<uint32_t>(num_ranks), tfra_owner};
  const int ranks = static_cast<int>(num_ranks), shared = stable_split::SharedBytes(num_ranks);
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.splits, unique_splits, num_segments + 1, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(at.totals, 0, num_ranks * sizeof(unsigned), stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(at.totals + num_ranks, 0xff, sizeof(unsigned), stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(message + size, 0, (message_size - size) * sizeof(int64_t), stream));
  if (tiles > 0) {
    FUSEDREC_LAUNCH(RankPartitionCountKernel, static_cast<unsigned>(tiles), kThreads, shared, stream, owner_of,
                    num_ids, tiles, id_bits, at.counts, at.totals + num_ranks);
    FUSEDREC_LAUNCH(stable_split::SumOverTilesKernel, static_cast<unsigned>(ranks), stable_split::SumThreads(tiles), 0,
                    stream, tiles, at.counts, at.totals);
  }
  FUSEDREC_LAUNCH(RankPartitionBeginsKernel, 1u, stable_split::kMaxBins, 0, stream, at.totals, ranks, at.rank_begin);
  if (num_segments > 0) {
    FUSEDREC_LAUNCH(RankPartitionBoundsKernel, static_cast<unsigned>(num_segments + 1), kThreads, 0, stream, owner_of,
                    at.splits, num_ids, tiles, at.counts, at.totals, at.before);
    FUSEDREC_LAUNCH(RankPartitionHeadersKernel, BlocksFor(num_segments * num_ranks, kThreads), kThreads, 0, stream,
                    num_segments, ranks, at.before, at.rank_begin, message);
  }
  if (tiles > 0) {
    FUSEDREC_LAUNCH(RankPartitionPlaceKernel, static_cast<unsigned>(tiles), kThreads, shared, stream, owner_of,
                    num_ids, tiles, at.counts, PlaceId{unique_ids, at.rank_begin, num_segments, message, restore});
  }
  FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  return CopyToHost(counts, reinterpret_cast<const int32_t*>(at.totals), num_ranks + 1, stream);
}

int64_t fusedrec_unpack_message_scratch_bytes(int64_t num_segments, int64_t num_ranks) {
  return UnpackScratch(nullptr, num_segments, num_ranks).carver.bytes();
}

int fusedrec_message_headers(const int64_t* message, const int32_t* received_splits, int64_t num_segments,
                             int64_t num_ranks, void* scratch, int64_t* headers, void* stream) {
  if (num_segments < 0 || num_ranks < 0 || num_segments > kMaxIds) return kCudaInvalidValue;
  int64_t size = 0;
  for (int64_t r = 0; r < num_ranks; ++r) {
    if (received_splits[r] < num_segments) return kCudaInvalidValue;
    size += received_splits[r];
  }
  if (size > kMaxIds) return kCudaInvalidValue;
  const UnpackScratch at(scratch, num_segments, num_ranks);
  std::vector<int64_t> block_begin(num_ranks, 0);
  for (int64_t r = 1; r < num_ranks; ++r) block_begin[r] = block_begin[r - 1] + received_splits[r - 1];
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.block_begin, block_begin.data(), num_ranks, stream));
  FUSEDREC_LAUNCH(MessageHeadersKernel, BlocksFor(num_segments * num_ranks, kThreads), kThreads, 0, stream, message,
                  at.block_begin, num_segments, num_ranks, at.headers);
  FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  return CopyToHost(headers, at.headers, num_segments * num_ranks, stream);
}

int fusedrec_unpack_message(const int64_t* message, const int64_t* headers, int64_t num_segments, int64_t num_ranks,
                            void* scratch, int64_t* ids, int64_t* segment_splits, int32_t* position,
                            int32_t* id_splits, void* stream) {
  const int64_t runs = num_segments * num_ranks;
  std::fill(segment_splits, segment_splits + num_segments + 1, 0);
  std::vector<int64_t> run_begin(runs, 0), run_to(runs, 0);
  int64_t num_ids = 0;
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t r = run / num_segments, s = run % num_segments;
    if (headers[run] < 0 || headers[run] > kMaxIds - num_ids) return kCudaInvalidValue;
    if (s == 0) id_splits[r] = 0;
    run_begin[run] = num_ids;
    num_ids += headers[run];
    id_splits[r] += static_cast<int32_t>(headers[run]);
    segment_splits[s + 1] += headers[run];
  }
  for (int64_t s = 0; s < num_segments; ++s) segment_splits[s + 1] += segment_splits[s];
  std::vector<int64_t> next(segment_splits, segment_splits + num_segments);
  for (int64_t run = 0; run < runs; ++run) {
    run_to[run] = next[run % num_segments];
    next[run % num_segments] += headers[run];
  }
  if (num_ids == 0) return kCudaSuccess;
  const UnpackScratch at(scratch, num_segments, num_ranks);
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.run_begin, run_begin.data(), runs, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.run_to, run_to.data(), runs, stream));
  FUSEDREC_LAUNCH(UnpackMessageKernel, BlocksFor(num_ids, kThreads), kThreads, 0, stream, message, at.run_begin,
                  at.run_to, num_segments, runs, num_ids, ids, position);
  return LastError();
}
