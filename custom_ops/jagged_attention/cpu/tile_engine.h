// Types that the driver (jagged_attention.cc) and the tile engine share: plain structs, and the table of the engine's
// functions for one instruction set.
//
// The engine (engine_*.inc.h) is compiled once per instruction set, each time in a namespace of its own, by
// engine_avx512.cc, engine_avx2.cc and engine_generic.cc. The engine uses no templates or inline functions of others,
// and this header has data only. So the linker cannot merge code of a newer instruction set into the code of older
// machines.
#pragma once

#include "common/host_device.h"
#include "jagged_attention/call.h"

namespace fusedrec {

// Queries of a panel: the lanes of a tile. A multiple of the lanes of every vector unit.
constexpr int64_t kPanel = 64;
// Keys of a tile. Tiles of this size stay in the caches of one core and keep the share of loads and stores of
// accumulators small.
constexpr int64_t kTileKeys = 64;

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
  // Entry place(asking) - place(answering), from 1 - N on: the weights in reverse, so that they ascend with the queries of
  // a panel; kPanel zeros behind. nullptr: no position part.
  const float* position;
  TimeMap time;
  const int64_t* asks;     // [Tq]
  const int64_t* answers;  // [T]
  const float* weights;    // [num_thresholds + 1], of the distinct buckets
  const int64_t* thresholds;  // [num_thresholds], distinct, ascending
  int32_t num_thresholds;
  BucketCells cells;
  float parameters[3];  // of a function of time
};

// A call of an op, and what the driver makes of it.
struct AttentionProblem : AttentionCall<float> {
  BiasTables tables;
  float* attended_grads;  // backward, with a gate: gradient of out; then `grads` for the passes of the attention
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

// The functions of the gate for tokens [begin, end). The backward pass adds to weight_sums and bias_sums [columns].
struct GatePasses {
  void (*forward)(const AttentionProblem&, int64_t begin, int64_t end);
  void (*backward)(const AttentionProblem&, int64_t begin, int64_t end, float* weight_sums, float* bias_sums);
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
