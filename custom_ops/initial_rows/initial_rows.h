// Initial values of embedding rows: a pure function of (table seed, id, column).
//
// A row that was never trained has the same value on every rank, at every step and after eviction and return, so a
// model does not depend on the number of ranks or on the order in which ids arrive, and no two rows repeat.
//
// # Numbers
// Philox4x32-10, a counter-based generator (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011):
// key = table seed (64 bits), counter = (id low, id high, column or block of columns, attempt). Four columns share a
// call for the uniform distribution, a pair of columns one Box-Muller transform for the normal one; the truncated
// normal redraws a column outside two standard deviations with the next attempt number. Arithmetic is in double and
// rounded once, so the last bit does not hang on a float math library.
#ifndef FUSEDREC_INITIAL_ROWS_INITIAL_ROWS_H_
#define FUSEDREC_INITIAL_ROWS_INITIAL_ROWS_H_

#include <array>
#include <cstdint>

#include "absl/types/span.h"

namespace fusedrec {

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, uint64_t key);

enum class Distribution {
  kConstant,         // a everywhere
  kUniform,          // [a, b)
  kNormal,           // mean a, standard deviation b
  kTruncatedNormal,  // the same, redrawn outside a +- 2 b
};

// Fills `row` [D] with the initial value of `id` in the table of `seed`.
void InitialRow(Distribution distribution, double a, double b, uint64_t seed, int64_t id, absl::Span<float> row);

}  // namespace fusedrec

#endif  // FUSEDREC_INITIAL_ROWS_INITIAL_ROWS_H_
