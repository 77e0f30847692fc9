// One call of an attention op, for the kernels of both devices. The op kernel (attention_kernel.cc) fills and checks it
// once. Plain data: tests fill it through ctypes.
//
// T is the type of the arrays of tokens: void in the op and the launchers, float in the kernels of the CPU, the type of
// the tensors in those of a GPU. The layout is the same for all.
#pragma once

#include "common/host_device.h"

namespace fusedrec {

constexpr int64_t kAttentionMaxDim = 256;          // columns of a head on a GPU
constexpr int64_t kAttentionMaxThresholds = 4096;  // on a GPU

enum class TimeMap : int32_t { kNone, kBuckets, kPower, kExponential, kStretched };

struct RelativeBias {
  const float* position_weights;  // [2N-1], no row longer than N; or null: no position part
  int64_t max_length;             // N, or 0
  TimeMap time;
  int32_t num_thresholds;     // J
  const int64_t* thresholds;  // [J], host, not decreasing; kBuckets only
  const float* time_weights;  // [J+1] for kBuckets, the parameters of a function
  const int64_t* asks;        // [Tq], seconds
  const int64_t* answers;     // [T], seconds
};

// Entries of time_weights.
FUSEDREC_HOST_DEVICE inline int64_t NumTimeWeights(const RelativeBias& bias) {
  switch (bias.time) {
    case TimeMap::kNone: return 0;
    case TimeMap::kBuckets: return bias.num_thresholds + 1;
    case TimeMap::kStretched: return 3;
    default: return 2;
  }
}

// On a GPU, arrays are in device memory unless a comment says otherwise. Arrays that the call lacks are null.
template <typename T>
struct AttentionCall {
  int32_t type;        // of T on a GPU: 0 float, 1 half, 2 bfloat16
  int32_t channels;    // 0: attention; else channels of FuXi, position before time: no query, key, scale, alpha and gate
  int64_t batch, tokens, queries, heads, qk_dim, value_dim;  // B, T, Tq, H
  const int64_t* row_splits;          // [B+1], host, from 0 to T without decreasing
  const int64_t* query_splits;        // [B+1], host, to Tq: the last tokens of a row ask; row_splits where all do
  const int64_t* num_targets;         // [B], host, each between 0 and the row's queries; or null
  const int64_t* contextual_lengths;  // [B], host, each >= 0; or null
  int64_t target_group_size, attention_window, min_full_length, global_window;  // visibility.inc.h
  // Pairs hidden at random, a pure function of seed, row, head, key and query: those with fewer than `dropped` of 2^31.
  uint32_t dropped, pair_seed;
  RelativeBias bias;

  float alpha;
  int32_t scale_stride;  // 0: one scale for all tokens, 1: one per query token
  const float* scale;    // [1] or [Tq]
  const T* query;        // [Tq, H, qk_dim]
  const T* key;          // [T, H, qk_dim]
  const T* value;        // [T, H, value_dim]

  // gated = gate * norm(out), or norm(gate * out) with gate_first, where norm(x) = (x - mean) / sqrt(variance + epsilon) *
  // norm_weight + norm_bias, over the columns of all heads of a token, or of each head.
  const T* gate;             // [Tq, H, value_dim], or null: no gate and no norm
  const float* norm_weight;  // [H * value_dim], or null: 1
  const float* norm_bias;    // null with norm_weight
  float epsilon;
  int32_t per_head, gate_first;

  T* out;          // [Tq, H, value_dim], or [Tq, H, channels * value_dim]; an input of the backward pass of a gate
  T* gated;        // forward, with a gate
  const T* grads;  // backward: of out; with a gate, of gated
  T *query_grads, *key_grads, *value_grads, *gate_grads;
  float *position_grads, *time_grads, *norm_weight_grads, *norm_bias_grads;  // of the weights that there are
};

}  // namespace fusedrec
