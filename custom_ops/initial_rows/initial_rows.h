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

#include <algorithm>
#include <string>

#include "absl/types/span.h"
#include "initial_rows/initial_number.h"

namespace fusedrec {

// By the name that the ops take: "constant", "uniform", "normal" or "truncated_normal".
inline Distribution DistributionOf(const std::string& name) {
  return name == "constant"  ? Distribution::kConstant
         : name == "uniform" ? Distribution::kUniform
         : name == "normal"  ? Distribution::kNormal
                             : Distribution::kTruncatedNormal;
}

// Fills `row` [D] with the initial value of `id` in the table of `seed`.
inline void InitialRow(Distribution distribution, double a, double b, uint64_t seed, int64_t id,
                       absl::Span<float> row) {
  if (distribution == Distribution::kConstant) {
    std::fill(row.begin(), row.end(), static_cast<float>(a));
    return;
  }
  Four bits{};
  for (size_t d = 0; d < row.size(); ++d) {
    if (d % 4 == 0) bits = InitialBits(seed, id, static_cast<uint32_t>(d / 4));
    row[d] = InitialNumber(distribution, a, b, bits.number[d % 4]);
  }
}

}  // namespace fusedrec
