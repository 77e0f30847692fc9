// Types that the driver (jagged_attention.cc) and the tile engine share: plain structs, and the table of the engine's
// functions for one instruction set.
//
// The engine (engine_*.inc.h) is compiled once per instruction set, each time in a namespace of its own, by
// engine_avx512.cc, engine_avx2.cc and engine_generic.cc. The engine uses no templates or inline functions of others,
// and this header has data only. So the linker cannot merge code of a newer instruction set into the code of older
// machines.
#pragma once

#include <cstdint>

namespace fusedrec {

// Queries of a panel: the lanes of a tile. A multiple of the lanes of every vector unit.
constexpr int64_t kPanel = 64;
// Keys of a tile. Tiles of this size stay in the caches of one core and keep the share of loads and stores of
// accumulators small.
constexpr int64_t kTileKeys = 64;

enum class TimeMap { kNone, kBuckets, kPower, kExponential, kStretched };

// Buckets of time differences of up to 2^31 - 2 seconds. The bits of (float)difference, shifted, name a cell. A cell
// knows the bucket of its smallest difference, and `probes` comparisons with the next thresholds lead to the exact one.
struct BucketCells {
  const int32_t* begin;       // [num_cells]
  const int32_t* thresholds;  // distinct, ascending; then as many INT32_MAX as there are probes
  int32_t num_cells;
  int32_t shift;
  int32_t probes;
};

struct BiasTables {
  // Entry N - 1 + place(asking) - place(answering): the weights in reverse, so that they ascend with the queries of a
  // panel; kPanel zeros behind. nullptr: no position part.
  const float* position;
  int64_t max_length;  // N

  TimeMap time;
  const int64_t* asks;     // [T], of the query tokens
  const int64_t* answers;  // [T]
  const float* weights;    // [num_thresholds + 1], of the distinct buckets
  const int64_t* thresholds;  // [num_thresholds], distinct, ascending
  int64_t num_thresholds;
  BucketCells cells;
  float parameters[3];  // of a function of time
};

// One call of an op. Arrays of tokens are [T, heads, dim]. Rows may have fewer queries than keys: their last tokens ask.
struct AttentionProblem {
  int64_t heads;
  int64_t qk_dim;
  int64_t value_dim;
  float alpha;
  const float* query;  // of the query tokens, as out, grads, query_grads, scale and asks
  const float* key;
  const float* value;
  const float* scale;    // nullptr: 1
  int64_t scale_stride;  // 0: one for all tokens, 1: one per token

  const int64_t* row_splits;    // [B+1], of the keys
  const int64_t* query_splits;  // [B+1]; row_splits when every token asks
  const int64_t* num_targets;  // [B], or nullptr
  const int64_t* contextual_lengths;  // [B], or nullptr
  int64_t target_group_size;
  int64_t attention_window;
  int64_t min_full_length;
  int64_t global_window;
  // Pairs hidden at random, a pure function of seed, row, head, key and query (engine_masks.inc.h): those with fewer than
  // `dropped` of 2^31. 0: none.
  uint32_t dropped;
  uint32_t pair_seed;
  BiasTables bias;

  float* out;           // forward: [T, heads, value_dim]; channels: [T, heads, channels * value_dim]
  const float* grads;   // backward: gradient of out
  float* query_grads;
  float* key_grads;
  float* value_grads;
  bool bias_grads;  // whether position_grads and time_grads of the units are wanted
};

// The work that one thread does at a time.
struct AttentionUnit {
  int64_t row;
  int64_t head_begin, head_end;
  // Places in the row: queries in the forward pass, keys in the backward pass.
  int64_t begin, end;
  // Backward: queries [query_begin, length) may see the keys.
  int64_t query_begin;
  // Backward: gradients of these queries, [length - query_begin, heads of the unit, qk_dim]; nullptr: straight to
  // query_grads.
  float* query_grads;
  // Backward: sums over the pairs of this unit. position_grads[i - j + end - 1 - query_begin], kPanel zeros behind.
  float* position_grads;
  float* time_grads;  // [num_thresholds + 1], or of the parameters
};

// The functions of one op. Scratch: for units of up to `places` queries (forward) or keys (backward) and `heads` heads.
struct TilePasses {
  int64_t (*scratch_floats)(const AttentionProblem&, bool backward, int64_t places, int64_t heads);
  void (*forward)(const AttentionProblem&, const AttentionUnit&, float* scratch);
  void (*backward)(const AttentionProblem&, const AttentionUnit&, float* scratch);
};

// Gate and norm behind the attention: result = gate * norm(attended), or norm(gate * attended) with gate_first.
// norm(x) = (x - mean) / sqrt(variance + epsilon) * weight + bias, in each group of a token's columns on its own.
struct OutputGate {
  int64_t columns;  // of all heads; arrays of tokens are [Tq, columns]
  int64_t groups;   // >= 1, of the same size
  bool gate_first;
  float epsilon;
  const float* gate;
  const float* weight;  // [columns], or nullptr: 1
  const float* bias;    // [columns], or nullptr with weight
  const float* attended;
  float* result;       // forward
  const float* grads;  // backward: gradient of result
  float* gate_grads;
  float* attended_grads;
};

// The functions of the gate for tokens [begin, end). The backward pass adds to weight_sums and bias_sums [columns].
struct GatePasses {
  void (*forward)(const OutputGate&, int64_t begin, int64_t end);
  void (*backward)(const OutputGate&, int64_t begin, int64_t end, float* weight_sums, float* bias_sums);
};

struct TileEngine {
  const char* name;
  bool (*supported)();  // by the processor that runs this
  TilePasses attention;
  TilePasses channels;
  GatePasses gate;
};

#define FUSEDREC_TILE_FUNCTIONS(engine)                                    \
  {engine::AttentionScratchFloats, engine::Forward, engine::Backward}, {   \
    engine::ChannelScratchFloats, engine::ChannelsForward, engine::ChannelsBackward \
  }, { engine::GateForward, engine::GateBackward }

extern const TileEngine kGenericEngine;
#if defined(__x86_64__)
extern const TileEngine kAvx2Engine;
extern const TileEngine kAvx512Engine;
#endif

}  // namespace fusedrec
