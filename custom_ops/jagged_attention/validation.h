// Checks of the arguments of the ops of this folder. Messages name the argument, its value and the remedy.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "jagged_attention/cpu/jagged_attention.h"

namespace fusedrec {

// Shapes [Tq, H, Dqk], [T, H, Dqk], [T, H, Dv]. Tq is T without own_queries.
absl::Status RequireTokens(const std::vector<int64_t>& query, const std::vector<int64_t>& key,
                           const std::vector<int64_t>& value, bool own_queries);

// Shape [] or [Tq].
absl::Status RequireScale(const std::vector<int64_t>& scale, int64_t tokens);

// As many rows as row_splits, none with more queries than tokens.
absl::Status RequireQueries(absl::Span<const int64_t> row_splits, absl::Span<const int64_t> query_splits);

// query_splits: row_splits where every token asks.
absl::Status RequireTargets(absl::Span<const int64_t> row_splits, absl::Span<const int64_t> query_splits,
                            absl::Span<const int64_t> num_targets);

// One per row, each >= 0; or none.
absl::Status RequireContext(absl::Span<const int64_t> row_splits, absl::Span<const int64_t> contextual_lengths);

// 2N - 1 entries, no row longer than N.
absl::Status RequirePositionWeights(absl::Span<const int64_t> row_splits, int64_t size);

// The time part of a bias that has one.
absl::Status RequireTime(const RelativeBias& bias, int64_t queries, int64_t tokens);

}  // namespace fusedrec
