// When the gate behind the attention runs, and over which tokens.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "jagged_attention/cpu/jagged_attention.h"
#include "jagged_attention/cpu/tile_engine.h"

namespace fusedrec {

// Without the arrays of tokens except the gate.
OutputGate OutputGateOf(int64_t heads, int64_t value_dim, const GateInputs& inputs);

// Gates the queries of forward units. The last unit of the same queries does it, because a norm needs all heads.
class GateAfterUnits {
 public:
  // Units of the same queries lie together.
  GateAfterUnits(const AttentionProblem& problem, const std::vector<AttentionUnit>& units, const OutputGate& gate,
                 const GatePasses& passes);

  // Comes from the thread that has done a unit.
  void Done(int32_t unit);

 private:
  const AttentionProblem& problem_;
  const std::vector<AttentionUnit>& units_;
  const OutputGate& gate_;
  const GatePasses& passes_;
  std::vector<int32_t> block_;              // of each unit
  std::vector<std::atomic<int32_t>> open_;  // units that a block waits for
};

}  // namespace fusedrec
