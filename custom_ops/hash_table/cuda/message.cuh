// A received message, as its kernels see it.
#pragma once

#include "hash_table/cuda/rows.cuh"

namespace fusedrec::device_table {

constexpr uint32_t kNew = 0x80000000u;  // beside a slot, later a rank: the id has no row yet
constexpr uint8_t kAdmitted = 0, kCounted = 1, kUncounted = 2;  // verdicts on ids without a row (admission.cu)

// A received message: runs (source, segment) of ids, in order of arrival.
struct MessageView {
  const int64_t* entries;
  const int64_t* run_begin;  // [sources * segments + 1], headers not counted
  int64_t segments, runs, num_ids;

  // The run of position n, among [low, high].
  __device__ int64_t RunOf(int64_t low, int64_t high, int64_t n) const {
    return LastBegun([this](int64_t run) { return run_begin[run]; }, low, high, n);
  }
  __device__ int64_t Id(int64_t n, int64_t run) const { return entries[n + (run / segments + 1) * segments]; }
  // Bounds of the runs of this block's threads. All threads of the block call it.
  __device__ void Bounds(int64_t* low, int64_t* high) const {
    FUSEDREC_SHARED(int64_t, bounds, 2);
    if (threadIdx.x < 2) {
      const int64_t tile = static_cast<int64_t>(blockIdx.x) * blockDim.x, last = tile + blockDim.x - 1;
      bounds[threadIdx.x] = RunOf(0, runs - 1, threadIdx.x == 0 ? tile : last < num_ids ? last : num_ids - 1);
    }
    __syncthreads();
    *low = bounds[0];
    *high = bounds[1];
  }
};

// The row of id n of a message; kNowhere without one, and for n behind the ids. All threads of the block call it.
__device__ inline uint32_t FindReceived(const TableView& table, const MessageView& message, int64_t n) {
  int64_t low, high;
  message.Bounds(&low, &high);
  const bool active = n < message.num_ids;
  const int64_t run = active ? message.RunOf(low, high, n) : 0;
  const int64_t id = active ? message.Id(n, run) : 0;
  return FindRow(active ? table.segments + run % message.segments : nullptr, id, TableHash(id));
}

struct GroupedIds {
  const int64_t* ids;
  const int64_t* splits;  // device, [segments + 1]
  int64_t segments;

  __device__ int64_t SegmentOf(int64_t n) const {
    return LastBegun([this](int64_t segment) { return splits[segment]; }, int64_t{0}, segments - 1, n);
  }
};

struct Counts {
  unsigned long long distinct, fresh, bad;  // distinct rows; of them new; whether headers do not fit their message
  // Of a mixed table (mixed.cu): known rows to promote and to demote, new rows of the hot pool; ranks of rows that move
  // up, that move down, and of new rows in the hot pool and in the cold one.
  unsigned long long promoted, demoted, fresh_hot, ranks[4];
  unsigned long long fingerprint;  // of the message, where it is compared
};
constexpr int kFingerprintWord = sizeof(Counts) / sizeof(unsigned long long) - 1;

// What comes to the host: the findings of HandleFactsKernel on the inputs of an update, and on handles of an export.
// All bits of all words are set before the kernel; words only become smaller.
struct HandleFacts {
  unsigned oldest, newest;     // smallest clock, and smallest complement of a clock; all bits set: no handle has a row
  unsigned handles_are_sound;  // 0: one names a row that never was
  unsigned handles_are_distinct;  // 0: a row comes twice, in an update
  unsigned inverse_is_sound;   // 0: a number is no handle's
  unsigned grads_are_finite;   // 0: a number is not
  unsigned all_have_sums;      // 0: the row of a handle has no sum (update.cu)
};

struct SumsView {
  uint32_t* sum_of_row;  // [rows of the table]; kNowhere: the row has none
  int64_t* rows;         // [sums] row of each sum; ~row until a gradient comes, and where an earlier sum is the row's
  float* sums;           // [sums, dim]
};

// Gradients to look at; null: none.
struct Numbers {
  const void* data;
  Storage storage;
  int64_t count;
};

}  // namespace fusedrec::device_table
