// The attributes of the op HashTable that limit its segments.
//
// An attribute such as max_rows holds for all segments, the list beside it, segment_max_rows, has one value for each. Graphs
// of earlier versions have only the former.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/kernel_util.h"
#include "common/limits.h"
#include "hash_table/table_limits.h"

namespace fusedrec {

// The policies, in the order of Eviction.
constexpr const char* kEvictions[] = {"none", "lru", "lfu"};

// Reads an attribute of all segments, or the list beside it. *is_list: whether there is one.
template <typename T>
absl::Status ReadOfEach(tensorflow::OpKernelConstruction* ctx, const char* name, int64_t segments,
                        std::vector<T>* of_each, bool* is_list) {
  T of_all;
  const std::string list = absl::StrCat("segment_", name);
  TF_RETURN_IF_ERROR(ctx->GetAttr(name, &of_all));
  TF_RETURN_IF_ERROR(ctx->GetAttr(list, of_each));
  *is_list = !of_each->empty();
  if (!*is_list) of_each->assign(segments, of_all);
  if (static_cast<int64_t>(of_each->size()) == segments) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(list, " must be empty or one for each of the ", segments, " seeds, got ", of_each->size(), "."));
}

inline absl::Status ReadLimits(tensorflow::OpKernelConstruction* ctx, int64_t segments, std::vector<Limits>* limits) {
  constexpr char kNoLimit[] = "0, which sets no limit.";
  const struct {
    const char* name;
    int64_t Limits::*value;
    int64_t least;
    const char* remedy;
  } numbers[] = {{"max_rows", &Limits::max_rows, 0, kNoLimit},
                 {"ttl", &Limits::ttl, 0, kNoLimit},
                 {"admission_count", &Limits::admission_count, 1, "1 admits every id."},
                 {"max_candidates", &Limits::max_candidates, 0, kNoLimit},
                 {"frequency_decay_steps", &Limits::frequency_decay_steps, 0, "0, which halves no count."}};
  limits->resize(segments);
  bool is_list;
  for (const auto& number : numbers) {
    std::vector<int64_t> of_each;
    TF_RETURN_IF_ERROR(ReadOfEach(ctx, number.name, segments, &of_each, &is_list));
    for (int64_t s = 0; s < segments; ++s) {
      const std::string name = is_list ? absl::StrCat("segment_", number.name, "[", s, "]") : number.name;
      TF_RETURN_IF_ERROR(RequireIn(name.c_str(), of_each[s], number.least, kMostCount, number.remedy));
      (*limits)[s].*number.value = of_each[s];
    }
  }
  std::vector<std::string> policies;
  TF_RETURN_IF_ERROR(ReadOfEach(ctx, "eviction", segments, &policies, &is_list));
  for (int64_t s = 0; s < segments; ++s) {
    const auto known = std::find(std::begin(kEvictions), std::end(kEvictions), policies[s]);
    if (known == std::end(kEvictions)) {
      return absl::InvalidArgumentError(absl::StrCat("segment_eviction must hold '", absl::StrJoin(kEvictions, "', '"),
                                                     "' alone, got '", policies[s], "' at ", s, "."));
    }
    (*limits)[s].eviction = static_cast<Eviction>(known - std::begin(kEvictions));
  }
  return absl::OkStatus();
}

}  // namespace fusedrec
