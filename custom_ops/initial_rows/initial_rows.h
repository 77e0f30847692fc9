// Initial values of embedding rows: a pure function of (table seed, id, column).
//
// A row that was never trained has the same value on every rank, at every step and after eviction and return. So a
// model depends neither on the number of ranks nor on the order of ids, and no two rows repeat.
//
// # Numbers
// Philox4x32-10, a counter-based generator (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011):
// key = table seed (64 bits), counter = (id low, id high, block of four columns, 0), one 32-bit number per column. A
// number u becomes the distribution's quantile at (u + 1/2) / 2^32: no rejection, so a column never depends on another.
// The normal quantile is Wichura's AS 241 (Applied Statistics 37, 1988; relative error 1e-16), in double, rounded once.
#pragma once

#include <cstdint>
#include <string>

#include "absl/types/span.h"
#include "initial_rows/initial_number.h"

namespace fusedrec {

// By the name that the ops take: "constant", "uniform", "normal" or "truncated_normal".
Distribution DistributionOf(const std::string& name);

// Fills `row` [D] with the initial value of `id` in the table of `seed`.
void InitialRow(Distribution distribution, double a, double b, uint64_t seed, int64_t id, absl::Span<float> row);

}  // namespace fusedrec
