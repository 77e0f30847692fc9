// Pairs of a query and a key: who sees whom, and the bias between them.
//
// The rule of visibility stands in engine_masks.inc.h, in words. Times and places of a tile, the weights of its
// distances and the tables of buckets are in shared memory.
#pragma once

#include "common/device.cuh"
#include "common/host_device.h"

namespace fusedrec {
namespace attention {

__device__ inline int Lesser(int a, int b) { return a < b ? a : b; }
__device__ inline int Greater(int a, int b) { return a > b ? a : b; }

struct RowMask {
  int length, context, top, window, full_from, first, targets_from, group_size;
  bool contextual, grouped;

  __device__ int Number(int place) const { return Lesser(Greater(place - context, 0), top); }
  // Place of a token for the bias. All targets have the place after the history.
  __device__ int Place(int place) const { return Lesser(place, targets_from); }

  // The group of a target.
  __device__ int Group(int place) const { return (place - targets_from) / group_size; }

  // The least difference of a key's place and a query's in a tile: keys from k0 on, queries before q1.
  __device__ int LowestDistance(int q1, int k0) const { return Place(k0) - Place(q1 - 1); }

  __device__ bool Visible(int i, int j) const {
    const int asks = Number(i), answers = Number(j);
    bool visible = i == j || asks > answers;
    if (window > 0) visible = visible && (asks - answers <= window || asks >= full_from || answers < first);
    if (contextual && answers < top) visible = visible || asks == 0;
    if (grouped && j >= targets_from && i > j) visible = visible || Group(i) == Group(j);
    return visible;
  }
  // Returns whether none of queries [i0, i1) sees any of keys [j0, j1); may return false for an empty rectangle.
  __device__ bool Hidden(int i0, int i1, int j0, int j1) const {
    const int asks_low = Number(i0), asks_high = Number(i1 - 1), answers_low = Number(j0), answers_high = Number(j1 - 1);
    const bool near = window <= 0 || asks_low - answers_high <= window || asks_high >= full_from ||
                      answers_low < first;
    const bool causal = (i0 < j1 && j0 < i1) || asks_high > answers_low;
    return !(causal && near) && !(contextual && asks_low == 0 && answers_low < top) && !ShareGroup(i0, i1, j0, j1);
  }
  // Returns whether queries [i0, i1) and keys [j0, j1) have targets of one group.
  __device__ bool ShareGroup(int i0, int i1, int j0, int j1) const {
    if (!grouped || i1 <= targets_from || j1 <= targets_from) return false;
    return Group(Greater(i0, targets_from)) <= Group(j1 - 1) && Group(Greater(j0, targets_from)) <= Group(i1 - 1);
  }
};

// Dropout of pairs, as in engine_masks.inc.h.
struct PairDropout {
  unsigned dropped, seed;

  static __device__ unsigned Mix(unsigned x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
  }
  static __device__ unsigned Next(unsigned bits, unsigned number) { return Mix(bits + number * 0x9e3779b9u); }

  __device__ unsigned OfHead(int row, int64_t head) const { return Next(Next(seed, row), static_cast<unsigned>(head)); }
  __device__ bool Keeps(unsigned of_head, int query, int key) const {
    return dropped == 0 || Next(Next(of_head, key), query) >> 1 >= dropped;
  }
};

struct MaskOptions {
  int target_group_size, attention_window, min_full_length, global_window;
};

__device__ inline RowMask MaskOf(const MaskOptions& options, int64_t length, int64_t targets, int64_t context) {
  RowMask mask;
  mask.length = static_cast<int>(length);
  mask.contextual = context > 0;
  // A context that is longer than its row hides the row, whatever its length.
  mask.context = mask.contextual ? static_cast<int>(context < length + 2 ? context : length + 2) - 1 : 0;
  mask.top = mask.length - static_cast<int>(targets) - mask.context;
  mask.window = options.attention_window;
  // Without a full attention at the end, no number is large enough.
  mask.full_from = options.min_full_length > 0 ? mask.top - options.min_full_length : mask.length + 1;
  mask.first = options.global_window == 0 ? 0 : options.global_window + (mask.contextual ? 1 : 0);
  mask.targets_from = mask.length - static_cast<int>(targets);
  mask.group_size = options.target_group_size;
  mask.grouped = mask.group_size > 1 && targets > 1;
  return mask;
}

// Functions of time in place of buckets (attention_time_function.cuh), as launchers name them.
enum TimeKind { kNoFunction = 0, kPower = 1, kExponential = 2, kStretched = 3 };
constexpr int kTimeParameters = 3;  // at most

// Tables of the bias.
struct BiasTables {
  const float* position;          // device, [2N-1], or null
  int max_length;                 // N
  const long long* thresholds;    // [num_thresholds]
  const float* time_weights;      // [num_thresholds + 1]
  int num_thresholds;             // -1: no buckets
  TimeKind function;              // with parameters time_weights and no thresholds

  FUSEDREC_HOST_DEVICE bool has_time() const { return num_thresholds >= 0 || function != kNoFunction; }
};

// Number of thresholds <= difference.
__device__ inline int SearchBucket(const BiasTables& tables, unsigned long long difference) {
  int low = 0, high = tables.num_thresholds;
  while (low < high) {
    const int middle = (low + high) / 2;
    const long long threshold = tables.thresholds[middle];
    if (threshold <= 0 || static_cast<unsigned long long>(threshold) <= difference) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The same from a bucket nearby: times of neighbours differ little, so this is a step or none.
__device__ inline int StepBucket(const BiasTables& tables, unsigned long long difference, int bucket) {
  const auto reached = [&](int g) {
    return tables.thresholds[g] <= 0 || static_cast<unsigned long long>(tables.thresholds[g]) <= difference;
  };
  while (bucket < tables.num_thresholds && reached(bucket)) ++bucket;
  while (bucket > 0 && !reached(bucket - 1)) --bucket;
  return bucket;
}

__device__ inline unsigned long long TimeBetween(long long ask, long long answer) {
  const unsigned long long a = static_cast<unsigned long long>(ask), b = static_cast<unsigned long long>(answer);
  return ask >= answer ? a - b : b - a;
}

}  // namespace attention
}  // namespace fusedrec
