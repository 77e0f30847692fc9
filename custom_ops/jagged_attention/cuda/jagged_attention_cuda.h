// SiLU attention over rows of different length on a GPU, forward and backward, with its relative bias.
//
// jagged_attention.h has the contract: the same masks, the same bias by position and by time.
//
// # How
// A list holds tiles of rows of one sequence and head, the costliest first. A block takes one tile after another and goes
// over the tiles of columns that are not hidden. Forward, and for the gradient of the queries, the rows are queries and
// the columns keys. For the gradients of keys and values, the rows are keys and the columns queries. Products run on the
// tensor cores (attention_engine.cuh): bfloat16 and float16 with sums in float32, float32 as three products of tf32 parts.
// Scores live in registers and pass through shared memory as an operand of the next product. Nothing of size sequence x
// sequence reaches the device's memory. The backward pass computes the scores twice, for the gradient of the queries
// and for the other gradients. So one block sums each gradient in one order.
//
// # Bias
// Both parts come from small tables in shared memory (attention_pairs.cuh): the weights of the distances of a tile, and
// the thresholds and weights of the buckets. A few steps lead from the bucket of a pair to its neighbour's, exactly,
// with integers and without logarithms. For the gradients, a thread owns a distance of the tile, and a lane owns a row
// and adds while the bucket stays the same. There are no atomic operations. At most kAttentionSlots blocks run, each
// with its own sums, which are added in order. So gradients are the same on every run. Functions of time
// (attention_time_function.cuh) have few parameters, whose sums each thread keeps in registers.
//
// # Gate and norm
// With `gate`, a call ends with the gate and the norm of an HSTU block, and begins its backward pass with their gradients
// (attention_gate.cuh).
//
// # The channels of FuXi
// The weights are the bias alone, one map of position and one of time, without queries and keys. So the first product
// drops out. All heads share a map, so the heads of a value are the columns of one product. A block has a slice of
// kLargeSlice columns (attention_call.cuh) and a tile of queries. It reads a tile of values once and multiplies both maps
// with it. Backward, one pass over keys computes everything. One product gives the gradient of a map, another the
// gradient of the values. Slices add their share to the sums of the bias.
#pragma once

#include "common/cuda_api.h"

namespace fusedrec {

constexpr int64_t kAttentionSlots = 512;  // not the device's: the order of sums must not depend on it
constexpr int64_t kAttentionMaxDim = 256;
constexpr int64_t kAttentionMaxThresholds = 4096;

}  // namespace fusedrec

extern "C" {

// One call. Arrays are in device memory unless a comment says otherwise. Arrays that the call does not need are null.
struct FusedrecAttention {
  int64_t type;  // 0 float, 1 half, 2 bfloat16
  int64_t batch, tokens, heads, qk_dim, value_dim;
  int64_t target_group_size, attention_window, min_full_length, global_window;
  int64_t scale_stride;    // 0: one scale for all tokens, 1: one per query token
  int64_t max_length;      // N; 0: no position part
  int64_t num_thresholds;  // J; -1: no buckets
  int64_t per_head, gate_first;  // of the gate: norm by head; norm(gate * attention)
  int64_t time_function;   // 0: none, 1: power, 2: exponential, 3: stretched; without buckets
  double alpha, epsilon;
  const int64_t* row_splits;   // [B+1], host
  const int64_t* num_targets;  // [B], host, or null
  const int64_t* contextual_lengths;  // [B], host, or null
  const int64_t* query_splits;        // [B+1], host: the last tokens of a row ask; or null: every token
  const int64_t* thresholds;   // [J], host, not decreasing
  const void* query;           // [Tq, H, qk_dim]; Tq is T without query_splits
  const void* key;             // [T, H, qk_dim]
  const void* value;              // [T, H, value_dim]
  const float* scale;             // [1] or [Tq]
  const float* position_weights;  // [2N-1]
  const float* time_weights;      // [J+1], or the parameters of time_function
  const int64_t* asks;            // [Tq]
  const int64_t* answers;         // [T]
  const void* gate;              // [Tq, H, value_dim], or null: no gate and no norm
  const float* norm_weight;      // [H * value_dim], or null
  const float* norm_bias;        // null with norm_weight
  void* out;          // forward; of channels [Tq, H, channels * value_dim]. The backward pass of a gate reads it
  void* gated;        // forward, with a gate: [Tq, H, value_dim]
  const void* grads;  // backward: of out; with a gate, of gated
  void* query_grads;
  void* key_grads;
  void* value_grads;
  float* position_grads;  // written where there is a position part
  float* time_grads;
  void* gate_grads;  // with a gate
  float* norm_weight_grads;
  float* norm_bias_grads;
  int64_t dropped, pair_seed;  // below 2^31 and 2^32: pairs hidden at random (AttentionProblem of the CPU)
};
}

// Bytes of scratch of either pass.
FUSEDREC_CUDA_API int64_t fusedrec_jagged_attention_scratch_bytes(const FusedrecAttention* call);
FUSEDREC_CUDA_API int fusedrec_jagged_attention(const FusedrecAttention* call, void* scratch, void* stream);
FUSEDREC_CUDA_API int fusedrec_jagged_attention_grad(const FusedrecAttention* call, void* scratch, void* stream);

// The channels of FuXi: query, key, scale and alpha are not read, value_dim may have any size.
FUSEDREC_CUDA_API int64_t fusedrec_bias_attention_scratch_bytes(const FusedrecAttention* call);
FUSEDREC_CUDA_API int fusedrec_bias_attention(const FusedrecAttention* call, void* scratch, void* stream);
FUSEDREC_CUDA_API int fusedrec_bias_attention_grad(const FusedrecAttention* call, void* scratch, void* stream);
