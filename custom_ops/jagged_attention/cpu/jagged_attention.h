// SiLU attention over rows of different length with a relative bias, and the attention-free channels of FuXi, forward
// and backward.
//
//   out_i = scale_i * sum over j of SiLU(alpha q_i . k_j + bias_ij) visible_ij v_j      in each row and head
//   bias_ij = position_weights[N - 1 + place(j) - place(i)] + time(asks_i - answers_j)   shared by the heads
//   channels: out_i = [ sum over j of position_ij visible_ij v_j | sum over j of time_ij visible_ij v_j ]
//
// Sources: Zhai et al., Actions Speak Louder than Words (HSTU): the attention and its masks; Ye et al., FuXi-alpha and
// FuXi-beta: the channels. engine_masks.inc.h has the rule of visibility.
//
// A row may have fewer queries than keys, as when a server keeps the keys and values of a user's history. The queries
// are its last tokens, at their places in the row. A query sums its keys in the order of their places, however the work
// is cut. Its result has the bits of a call in which every token asks (short rows sum in another order).
//
// # How
// A row is cut into panels of queries and tiles of keys. A tile of scores stays in the cache of one core between the
// products that make it and the products that use it. Nothing of size sequence x sequence is kept; the backward pass
// computes the scores again. Tiles without a visible pair are never visited. Tiles with only visible pairs need no mask.
// There is no softmax, so tiles simply add up. Rows of one panel have a simpler path (engine_short.inc.h).
//
// Threads take units of work (a block of queries forward, a block of keys backward), the costliest first. Only the lengths
// of the rows decide how the work is cut. Each unit writes where no other unit writes. Sums over several units (gradients
// of queries of long rows, of the weights of the bias) are added in the order of the units afterwards. So the result is
// the same for any number of threads.
//
// # Gate and norm
// GatedAttention ends with the gate and the norm of an HSTU block. A norm of all columns needs all heads, which several
// units may have. The last of them to finish gates the tokens of their block, which are still in a cache. Backward, one
// pass over the tokens makes the gradients of gate and attention, because every unit reads these.
//
// The tile engine is compiled for several instruction sets (tile_engine.h); they differ in the last bits of results.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "common/parallel.h"
#include "jagged_attention/cpu/tile_engine.h"

namespace fusedrec {

// Parameters of a function of time; 0 for kNone and kBuckets.
int NumTimeParameters(TimeMap map);

// Sizes of the tokens and who sees whom.
struct JaggedRows {
  absl::Span<const int64_t> row_splits;   // [B+1], from 0 to T without decreasing (caller checks)
  // [B+1], from 0 to Tq: the last tokens of each row ask, and no row has more queries than tokens (caller checks). Empty:
  // every token asks.
  absl::Span<const int64_t> query_splits;
  absl::Span<const int64_t> num_targets;  // [B], each between 0 and the row's queries (caller checks), or empty: none
  absl::Span<const int64_t> contextual_lengths;  // [B], each >= 0 (caller checks), or empty: no context
  int64_t heads = 1;
  int64_t target_group_size = 1;
  int64_t attention_window = 0;  // 0: no window
  int64_t min_full_length = 0;
  int64_t global_window = 0;
  uint32_t dropped = 0;  // pairs hidden at random, of 2^31 (AttentionProblem)
  uint32_t pair_seed = 0;

  absl::Span<const int64_t> queries() const { return query_splits.empty() ? row_splits : query_splits; }
};

struct RelativeBias {
  absl::Span<const float> position_weights;  // [2N-1], no row longer than N (caller checks), or empty: no position part
  TimeMap time = TimeMap::kNone;
  absl::Span<const float> time_weights;   // [J+1] for kBuckets, the parameters of a function
  absl::Span<const int64_t> thresholds;   // [J], not decreasing (caller checks); kBuckets only
  absl::Span<const int64_t> asks, answers;  // [Tq], [T], seconds
};

// Gradients of the weights of the bias, as long as these. Empty: not wanted.
struct BiasGrads {
  absl::Span<float> position_weights;
  absl::Span<float> time_weights;
};

struct AttentionInputs {
  const float* query;  // [Tq, H, qk_dim]
  const float* key;    // [T, H, qk_dim]
  const float* value;  // [T, H, value_dim]
  int64_t qk_dim;
  int64_t value_dim;
  float alpha;
  absl::Span<const float> scale;  // [Tq] with scale_per_token, else [1]
  bool scale_per_token;
};

// out: [Tq, H, value_dim].
void JaggedAttention(const JaggedRows& rows, const AttentionInputs& inputs, const RelativeBias& bias,
                     const TileEngine& engine, const ParallelFor& parallel_for, float* out);

// grads: of out. The three results are of the shapes of query, key and value.
void JaggedAttentionGrad(const JaggedRows& rows, const AttentionInputs& inputs, const RelativeBias& bias,
                         const float* grads, const TileEngine& engine, const ParallelFor& parallel_for,
                         float* query_grads, float* key_grads, float* value_grads, const BiasGrads& bias_grads);

// Gate and norm behind the attention (OutputGate in tile_engine.h).
struct GateInputs {
  const float* gate;                      // [Tq, H, value_dim]
  absl::Span<const float> weight, bias;   // [H * value_dim], or both empty: a norm without weights
  bool per_head;                          // the norm is of each head's columns, not of all columns
  bool gate_first;                        // norm(gate * attention), not gate * norm(attention)
  float epsilon;
};

struct GateGrads {
  float* gate;
  absl::Span<float> weight, bias;
};

// attended, out: [Tq, H, value_dim], the attention and the gated result.
void GatedAttention(const JaggedRows& rows, const AttentionInputs& inputs, const GateInputs& gate,
                    const RelativeBias& bias, const TileEngine& engine, const ParallelFor& parallel_for,
                    float* attended, float* out);

// attended: of the forward pass. grads: of out. attended_grads: memory of their shape for the gradients of the attention,
// with which JaggedAttentionGrad goes on.
void OutputGateGrad(int64_t heads, int64_t value_dim, int64_t tokens, const GateInputs& gate, const float* attended,
                    const float* grads, const TileEngine& engine, const ParallelFor& parallel_for,
                    float* attended_grads, const GateGrads& gate_grads);

// out [Tq, H, channels * value_dim]: the position channel, then the time channel. A bias without one of them has no such
// channel.
void JaggedBiasAttention(const JaggedRows& rows, const float* value, int64_t value_dim, const RelativeBias& bias,
                         const TileEngine& engine, const ParallelFor& parallel_for, float* out);

void JaggedBiasAttentionGrad(const JaggedRows& rows, const float* value, int64_t value_dim, const RelativeBias& bias,
                             const float* grads, const TileEngine& engine, const ParallelFor& parallel_for,
                             float* value_grads, const BiasGrads& bias_grads);

// Engines that this processor can run, the best one first.
std::vector<const TileEngine*> Engines();

}  // namespace fusedrec
