// Gradients that several units of a backward pass share: each holds its own part, and parts are added up in the order
// of the units.
#pragma once

#include <cstdint>
#include <vector>

#include "common/parallel.h"
#include "jagged_attention/cpu/jagged_attention.h"
#include "jagged_attention/cpu/prepared_bias.h"
#include "jagged_attention/cpu/tile_engine.h"

namespace fusedrec {

class UnitGrads {
 public:
  // Gives each unit its memory, all zeros. The first unit of a row writes the gradients of its queries where they
  // belong; the others, to memory of their own.
  UnitGrads(const AttentionProblem& problem, const PreparedBias& bias, std::vector<AttentionUnit>* units);

 private:
  std::vector<float> memory_;
};

void AddQueryGrads(const AttentionProblem& problem, const std::vector<AttentionUnit>& units,
                   const ParallelFor& parallel_for);

void AddBiasGrads(const AttentionProblem& problem, const PreparedBias& bias, const std::vector<AttentionUnit>& units,
                  const BiasGrads& grads);

}  // namespace fusedrec
