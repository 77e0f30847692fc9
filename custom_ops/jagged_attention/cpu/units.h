// How the work of an op is cut into units, and who does them.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "common/parallel.h"
#include "jagged_attention/cpu/tile_engine.h"

namespace fusedrec {

inline int64_t RowLength(const AttentionProblem& problem, int64_t row) {
  return problem.row_splits[row + 1] - problem.row_splits[row];
}

// The place of the row's first query.
inline int64_t FirstQuery(const AttentionProblem& problem, int64_t row) {
  return RowLength(problem, row) - (problem.query_splits[row + 1] - problem.query_splits[row]);
}

// Units of one pass, row by row, in the order of their places; without memory for gradients. They depend on the rows
// alone, not on the threads.
std::vector<AttentionUnit> Units(const AttentionProblem& problem, int64_t num_rows, bool backward);

// Runs all units, the costliest first; threads take the next one when they are done. The thread of a unit calls `after`
// with its number.
void RunUnits(const AttentionProblem& problem, const std::vector<AttentionUnit>& units, const TilePasses& passes,
              bool backward, const ParallelFor& parallel_for, const std::function<void(int32_t)>& after = {});

}  // namespace fusedrec
