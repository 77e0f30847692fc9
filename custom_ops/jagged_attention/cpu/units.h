// How the work of an op is cut into units, who does them, and gradients that several units of a backward pass share: each
// unit has its own part, and the parts are added in the order of the units.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "common/parallel.h"
#include "jagged_attention/cpu/prepared_bias.h"
#include "jagged_attention/cpu/tile_engine.h"

namespace fusedrec {

// Units of one pass, row by row, in the order of their places; without memory for gradients. They depend on the rows
// alone, not on the threads.
std::vector<AttentionUnit> Units(const AttentionProblem& problem, bool backward);

// Runs all units, the costliest first; threads take the next one when they are done. The thread of a unit calls `after`
// with its number.
void RunUnits(const AttentionProblem& problem, const std::vector<AttentionUnit>& units, const TilePasses& passes,
              bool backward, const ParallelFor& parallel_for, const std::function<void(int32_t)>& after = {});

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

void AddBiasGrads(const AttentionProblem& problem, const PreparedBias& bias, const std::vector<AttentionUnit>& units);

}  // namespace fusedrec
