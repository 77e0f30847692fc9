// A call of attention, as its kernels see it, and the pairs of a query and a key in it.
#pragma once

#include "common/device.cuh"
#include "jagged_attention/call.h"

namespace fusedrec::attention {

#include "jagged_attention/visibility.inc.h"

__device__ inline int Lesser(int a, int b) { return a < b ? a : b; }
__device__ inline int Greater(int a, int b) { return a > b ? a : b; }

constexpr int kTimeParameters = 3;  // of a function of time, at most

// Rows of a tile that a block owns: places from `begin` on of sequence `row`.
struct Item {
  int row, begin;
};

template <typename T>
struct Problem : AttentionCall<T> {
  const Item* items[2];  // tiles of queries, and of keys
  int64_t num_items[2];
  int64_t slices;                      // of the columns of all heads (attention_channels.cuh)
  int64_t slots;                       // of the pass over keys, each with sums of its own for the bias
  float *position_slots, *time_slots;  // [slots, 2N-1], [slots, NumTimeWeights]
  // Of the gate.
  int* done;         // [items of queries]: heads that are attended
  T* attended_grads;  // [Tq, H, value_dim]
  float* statistics;  // [Tq, groups, 2]: mean, and one over the deviation; null without weights
  int64_t gate_slots;
  float *weight_slots, *bias_slots;  // [gate_slots, H * value_dim]
};

FUSEDREC_HOST_DEVICE inline bool HasPosition(const RelativeBias& bias) { return bias.position_weights != nullptr; }
FUSEDREC_HOST_DEVICE inline bool HasTime(const RelativeBias& bias) { return bias.time != TimeMap::kNone; }
FUSEDREC_HOST_DEVICE inline bool HasBuckets(const RelativeBias& bias) { return bias.time == TimeMap::kBuckets; }
FUSEDREC_HOST_DEVICE inline bool HasFunction(const RelativeBias& bias) { return bias.time > TimeMap::kBuckets; }

// The least difference of a key's place and a query's in a tile: keys from k0 on, queries before q1.
__device__ inline int LowestDistance(const RowMask& mask, int q1, int k0) { return mask.Place(k0) - mask.Place(q1 - 1); }

// SearchBucket from a bucket nearby: times of neighbours differ little, so this is a step or none.
__device__ inline int StepBucket(const RelativeBias& bias, uint64_t difference, int bucket) {
  while (bucket < bias.num_thresholds && Reaches(difference, bias.thresholds[bucket])) ++bucket;
  while (bucket > 0 && !Reaches(difference, bias.thresholds[bucket - 1])) --bucket;
  return bucket;
}

// The bucket of a pair. near: that of the pair before it in this thread, or -1.
__device__ inline int BucketOf(const RelativeBias& bias, int64_t ask, int64_t answer, int near) {
  const uint64_t difference = TimeBetween(ask, answer);
  if (near < 0) return SearchBucket(bias.thresholds, bias.num_thresholds, difference);
  return StepBucket(bias, difference, near);
}

}  // namespace fusedrec::attention
