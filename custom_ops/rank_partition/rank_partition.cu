#include "rank_partition/rank_partition_cuda.h"

#include "common/device.cuh"
#include "common/hash.h"
#include "common/sort.cuh"

namespace fusedrec::rank_partition {

// owner[u]: of each id. *misfit, all ones before, becomes the first u whose id does not fit its bits.
FUSEDREC_KERNEL RankPartitionOwnersKernel(const int64_t* __restrict__ ids, int64_t num_ids, uint32_t ranks, int tfra,
                                          int id_bits, uint32_t* __restrict__ owner, unsigned* misfit) {
  const int64_t u = GlobalThread();
  if (u >= num_ids) return;
  owner[u] = tfra != 0 ? TfraOwner(ids[u], ranks) : HashRangeOwner(ids[u], ranks);
  if (id_bits < 64 && static_cast<uint64_t>(ids[u]) >> id_bits != 0) atomicMin(misfit, static_cast<unsigned>(u));
}

// rank_begin[r]: row of the first id of owner r, up to and with r = R: the number of ids of the owners before.
FUSEDREC_KERNEL RankPartitionBeginsKernel(const uint32_t* __restrict__ sorted_owner, int64_t num_ids, int64_t ranks,
                                          unsigned* __restrict__ rank_begin) {
  const int64_t r = GlobalThread();
  if (r > ranks) return;
  const auto owners_up_to = [&](int64_t row) { return row == 0 ? int64_t{0} : int64_t{sorted_owner[row - 1]} + 1; };
  rank_begin[r] = static_cast<unsigned>(LastBegun(owners_up_to, int64_t{0}, num_ids, r));
}

// Counts of each owner and segment: the owner's ids before a bound of the segment, less those before the previous bound.
// Ids of one owner have ascending places.
FUSEDREC_KERNEL RankPartitionHeadersKernel(const int64_t* __restrict__ splits, int64_t num_segments, int64_t ranks,
    const int32_t* __restrict__ place, const unsigned* __restrict__ rank_begin, int64_t* __restrict__ message) {
  const int64_t i = GlobalThread();
  if (i >= num_segments * ranks) return;
  const int64_t r = i / num_segments, s = i % num_segments, begin = rank_begin[r], end = rank_begin[r + 1];
  const auto places_up_to = [&](int64_t row) { return row == begin ? int64_t{0} : int64_t{place[row - 1]} + 1; };
  message[begin + i] = LastBegun(places_up_to, begin, end, splits[s + 1]) - LastBegun(places_up_to, begin, end, splits[s]);
}

FUSEDREC_KERNEL RankPartitionPlaceKernel(const int64_t* __restrict__ ids, int64_t num_ids,
    const uint32_t* __restrict__ sorted_owner, const int32_t* __restrict__ place, int64_t num_segments,
    int64_t* __restrict__ message, int32_t* __restrict__ restore) {
  const int64_t row = GlobalThread();
  if (row >= num_ids) return;
  restore[place[row]] = static_cast<int32_t>(row);
  message[row + (sorted_owner[row] + int64_t{1}) * num_segments] = ids[place[row]];  // after the headers of owners 0 to r
}

// headers[r, s] out of the blocks that begin at block_begin[r].
FUSEDREC_KERNEL MessageHeadersKernel(const int64_t* __restrict__ message, const int64_t* __restrict__ block_begin,
                                     int64_t num_segments, int64_t num_ranks, int64_t* __restrict__ headers) {
  const int64_t i = GlobalThread();
  if (i < num_segments * num_ranks) headers[i] = message[block_begin[i / num_segments] + i % num_segments];
}

// Runs (r, s) of ids in order of arrival: run_begin [R * S], the first place in that order; run_to [R * S], in ids.
FUSEDREC_KERNEL UnpackMessageKernel(const int64_t* __restrict__ message, const int64_t* __restrict__ run_begin,
                                    const int64_t* __restrict__ run_to, int64_t num_segments, int64_t num_runs,
                                    int64_t num_ids, int64_t* __restrict__ ids, int32_t* __restrict__ position) {
  const int64_t v = GlobalThread();
  if (v >= num_ids) return;
  const int64_t run = LastBegun([&](int64_t r) { return run_begin[r]; }, int64_t{0}, num_runs - 1, v);
  const int64_t to = run_to[run] + v - run_begin[run];
  ids[to] = message[v + (run / num_segments + 1) * num_segments];
  position[v] = static_cast<int32_t>(to);
}

}  // namespace fusedrec::rank_partition

#ifndef __CUDACC_RTC__
using namespace fusedrec;                  // NOLINT
using namespace fusedrec::rank_partition;  // NOLINT

int fusedrec_rank_partition(const int64_t* unique_ids, const int64_t* unique_splits, int64_t num_ids,
    int64_t num_segments, int64_t num_ranks, int tfra_owner, int id_bits, const FusedrecAllocator* memory,
    int64_t* message, int64_t message_size, int32_t* counts, int32_t* restore, void* stream) {
  const int64_t size = num_ids + num_ranks * num_segments;
  int64_t* splits;
  unsigned* begins;  // [R + 2]; the last one: misfit, so that one copy brings both
  ScratchMemory scratch(memory);
  FUSEDREC_TRY(scratch.Take({{&splits, num_segments + 1}, {&begins, num_ranks + 2}}));
  PositionSort sort;
  FUSEDREC_TRY(sort.Take(num_ids, &scratch));
  FUSEDREC_TRY(CopyToDevice(splits, unique_splits, num_segments + 1, stream));
  FUSEDREC_TRY(Fill(begins + num_ranks + 1, 0xff, sizeof(unsigned), stream));
  FUSEDREC_TRY(Fill(message + size, 0, (message_size - size) * sizeof(int64_t), stream));
  FUSEDREC_FOR_EACH(RankPartitionOwnersKernel, num_ids, stream, unique_ids, num_ids, static_cast<uint32_t>(num_ranks),
                    tfra_owner, id_bits, sort.keys(), begins + num_ranks + 1);
  Sorted sorted;
  FUSEDREC_TRY(sort.ByKey(static_cast<uint32_t>(num_ranks - 1), &sorted, stream));
  FUSEDREC_FOR_EACH(RankPartitionBeginsKernel, num_ranks + 1, stream, sorted.keys, num_ids, num_ranks, begins);
  FUSEDREC_FOR_EACH(RankPartitionHeadersKernel, num_segments * num_ranks, stream, splits, num_segments, num_ranks,
                    sorted.positions, begins, message);
  FUSEDREC_FOR_EACH(RankPartitionPlaceKernel, num_ids, stream, unique_ids, num_ids, sorted.keys, sorted.positions,
                    num_segments, message, restore);
  FUSEDREC_TRY(LastError());
  std::vector<int32_t> answers(num_ranks + 2);
  FUSEDREC_TRY(CopyToHost(answers.data(), reinterpret_cast<const int32_t*>(begins), num_ranks + 2, stream));
  for (int64_t r = 0; r < num_ranks; ++r) counts[r] = answers[r + 1] - answers[r];
  counts[num_ranks] = answers[num_ranks + 1];
  return kCudaSuccess;
}

int fusedrec_message_headers(const int64_t* message, const int32_t* received_splits, int64_t num_segments,
                             int64_t num_ranks, const FusedrecAllocator* memory, int64_t* headers, void* stream) {
  const int64_t runs = num_segments * num_ranks;
  int64_t *begins, *on_device;
  ScratchMemory scratch(memory);
  FUSEDREC_TRY(scratch.Take({{&begins, num_ranks}, {&on_device, runs}}));
  std::vector<int64_t> block_begin(num_ranks, 0);
  for (int64_t r = 1; r < num_ranks; ++r) block_begin[r] = block_begin[r - 1] + received_splits[r - 1];
  FUSEDREC_TRY(CopyToDevice(begins, block_begin.data(), num_ranks, stream));
  FUSEDREC_FOR_EACH(MessageHeadersKernel, runs, stream, message, begins, num_segments, num_ranks, on_device);
  FUSEDREC_TRY(LastError());
  return CopyToHost(headers, on_device, runs, stream);
}

int fusedrec_unpack_message(const int64_t* message, const int64_t* headers, int64_t num_segments, int64_t num_ranks,
                            const FusedrecAllocator* memory, int64_t* ids, int64_t* segment_splits,
                            int32_t* position, int32_t* id_splits, void* stream) {
  const int64_t runs = num_segments * num_ranks;
  std::fill(segment_splits, segment_splits + num_segments + 1, 0);
  std::vector<int64_t> run_begin(runs, 0), run_to(runs, 0);
  int64_t num_ids = 0;
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t r = run / num_segments, s = run % num_segments;
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
  int64_t *begins, *places;
  ScratchMemory scratch(memory);
  FUSEDREC_TRY(scratch.Take({{&begins, runs}, {&places, runs}}));
  FUSEDREC_TRY(CopyToDevice(begins, run_begin.data(), runs, stream));
  FUSEDREC_TRY(CopyToDevice(places, run_to.data(), runs, stream));
  FUSEDREC_FOR_EACH(UnpackMessageKernel, num_ids, stream, message, begins, places, num_segments, runs, num_ids, ids,
                    position);
  return LastError();
}
#endif
