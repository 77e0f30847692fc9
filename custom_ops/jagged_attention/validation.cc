#include "jagged_attention/validation.h"

#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace fusedrec {
namespace {

std::string Shape(const std::vector<int64_t>& dims) { return absl::StrCat("[", absl::StrJoin(dims, ","), "]"); }

template <typename... Words>
absl::Status Invalid(const Words&... words) {
  return absl::InvalidArgumentError(absl::StrCat(words...));
}

}  // namespace

int NumTimeParameters(TimeMap map) {
  switch (map) {
    case TimeMap::kPower:
    case TimeMap::kExponential: return 2;
    case TimeMap::kStretched: return 3;
    default: return 0;
  }
}

absl::Status RequireTokens(const std::vector<int64_t>& query, const std::vector<int64_t>& key,
                           const std::vector<int64_t>& value, bool own_queries) {
  if (own_queries && (key[1] != query[1] || key[2] != query[2])) {
    return Invalid("key must have the heads and columns of query ", Shape(query), ", got ", Shape(key),
                   ". With query_splits, only the number of tokens may differ.");
  }
  if (!own_queries && key != query) {
    return Invalid("key must have the shape of query ", Shape(query), ", got ", Shape(key),
                   ". Queries and keys need the same tokens, heads and columns; pass query_splits where the last tokens "
                   "of each row ask.");
  }
  if (value[0] != key[0] || value[1] != key[1]) {
    return Invalid("value must have the tokens and heads of ", own_queries ? "key " : "query ", Shape(key), ", got ",
                   Shape(value), ". Only its last dimension may differ.");
  }
  return absl::OkStatus();
}

absl::Status RequireQueries(absl::Span<const int64_t> row_splits, absl::Span<const int64_t> query_splits) {
  if (query_splits.size() != row_splits.size()) {
    return Invalid("query_splits must have one entry per entry of row_splits, that is ", row_splits.size(), ", got ",
                   query_splits.size(), ". A row without queries has an empty range.");
  }
  for (size_t b = 1; b < row_splits.size(); ++b) {
    const int64_t queries = query_splits[b] - query_splits[b - 1], length = row_splits[b] - row_splits[b - 1];
    if (queries > length) {
      return Invalid("query_splits must give row ", b - 1, " at most one query per token, that is ", length, ", got ",
                     queries, ". The queries of a row are its last tokens, which have keys and values, too.");
    }
  }
  return absl::OkStatus();
}

absl::Status RequireScale(const std::vector<int64_t>& scale, int64_t tokens) {
  if (scale.empty() || (scale.size() == 1 && scale[0] == tokens)) return absl::OkStatus();
  return Invalid("scale must have shape [] or [", tokens, "], one per query token, got ", Shape(scale),
                 ". Pass 1 / N for the rule of the HSTU papers.");
}

absl::Status RequireTargets(absl::Span<const int64_t> row_splits, absl::Span<const int64_t> query_splits,
                            absl::Span<const int64_t> num_targets) {
  if (num_targets.size() + 1 != row_splits.size()) {
    return Invalid("num_targets must have one entry per row, that is ", row_splits.size() - 1, ", got ",
                   num_targets.size(), ".");
  }
  for (size_t b = 0; b < num_targets.size(); ++b) {
    const int64_t length = row_splits[b + 1] - row_splits[b];
    if (num_targets[b] < 0 || num_targets[b] > length) {
      return Invalid("num_targets[", b, "] must lie between 0 and the row's length ", length, ", got ",
                     num_targets[b], ". Targets are the last tokens of a row.");
    }
    const int64_t queries = query_splits[b + 1] - query_splits[b];
    if (num_targets[b] > queries) {
      return Invalid("num_targets[", b, "] must be at most the row's queries ", queries, ", got ", num_targets[b],
                     ". Every target asks.");
    }
  }
  return absl::OkStatus();
}

absl::Status RequireContext(absl::Span<const int64_t> row_splits, absl::Span<const int64_t> contextual_lengths) {
  if (contextual_lengths.empty()) return absl::OkStatus();
  if (contextual_lengths.size() + 1 != row_splits.size()) {
    return Invalid("contextual_length must have one entry per row, that is ", row_splits.size() - 1, ", got ",
                   contextual_lengths.size(), ". Pass a number for the same length in all rows.");
  }
  for (size_t b = 0; b < contextual_lengths.size(); ++b) {
    if (contextual_lengths[b] < 0) {
      return Invalid("contextual_length[", b, "] must be >= 0, got ", contextual_lengths[b],
                     ". Use 0 for a row without context.");
    }
  }
  return absl::OkStatus();
}

absl::Status RequirePositionWeights(absl::Span<const int64_t> row_splits, int64_t size) {
  if (size % 2 == 0) {
    return Invalid("position_weights must have 2N - 1 entries for rows of up to N tokens, got ", size,
                   ". Entry N - 1 is of distance 0.");
  }
  const int64_t longest = (size + 1) / 2;
  for (size_t b = 1; b < row_splits.size(); ++b) {
    if (row_splits[b] - row_splits[b - 1] > longest) {
      return Invalid("row ", b - 1, " has ", row_splits[b] - row_splits[b - 1],
                     " tokens, longer than N = ", longest, " of position_weights [2N - 1]. Trim it, or raise N.");
    }
  }
  return absl::OkStatus();
}

absl::Status RequireTime(const RelativeBias& bias, int64_t queries, int64_t tokens) {
  for (const auto& [name, times, wanted] :
       {std::make_tuple("asks", bias.asks, queries), std::make_tuple("answers", bias.answers, tokens)}) {
    if (static_cast<int64_t>(times.size()) != wanted) {
      return Invalid(name, " must have one time per token, that is ", wanted, ", got ", times.size(),
                     ". Make both with sequence_times from timestamps that have the rows of the sequence.");
    }
  }
  const int64_t weights = bias.time_weights.size();
  if (bias.time != TimeMap::kBuckets) {
    if (weights == NumTimeParameters(bias.time)) return absl::OkStatus();
    return Invalid("time_weights must hold the ", NumTimeParameters(bias.time),
                   " parameters of this function of time, got ", weights, ".");
  }
  if (weights != static_cast<int64_t>(bias.thresholds.size()) + 1) {
    return Invalid("time_weights must have one entry more than thresholds, that is ", bias.thresholds.size() + 1,
                   ", got ", weights, ".");
  }
  for (size_t g = 1; g < bias.thresholds.size(); ++g) {
    if (bias.thresholds[g] < bias.thresholds[g - 1]) {
      return Invalid("thresholds must not decrease, got ", bias.thresholds[g - 1], " then ", bias.thresholds[g],
                     " at entry ", g, ". Sort them.");
    }
  }
  return absl::OkStatus();
}

}  // namespace fusedrec
