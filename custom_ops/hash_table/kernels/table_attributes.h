// The attributes of the op HashTable as a TableSpec and an update rule.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/kernel_util.h"
#include "common/limits.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/kernels/limit_attributes.h"

namespace fusedrec {

inline absl::Status ReadAttributes(tensorflow::OpKernelConstruction* ctx, TableSpec* read) {
  constexpr char kNoLimit[] = "0, which sets no limit.";
  TableSpec& spec = *read;
  int64_t dim;
  float a, b;
  std::string storage, distribution, unknown, rule;
  std::vector<float> parameters;
  std::vector<int64_t> seeds;
  const std::pair<const char*, std::string*> strings[] = {
      {"storage", &storage},
      {"distribution", &distribution},
      {"unknown", &unknown},
      {"tier_folder", &spec.tier_folder},
      {"rule", &rule}};
  const std::pair<const char*, bool*> flags[] = {{"stochastic_rounding", &spec.stochastic_rounding},
                                                 {"record_tombstones", &spec.record_tombstones},
                                                 {"averaged", &spec.averaged},
                                                 {"host_rows", &spec.host_rows}};
  const struct {
    const char* name;
    int64_t *value, least, most;
    const char* remedy;
  } numbers[] = {{"dim", &dim, 1, kMostColumns, "the columns of a row."},
                 {"hot_after", &spec.hot_after, 0, kMostCount, kNoLimit},
                 {"memory_budget", &spec.memory_budget, 0, kMostCount, kNoLimit},
                 {"hot_rows", &spec.hot_rows, 0, kMostPositions, "0, which keeps no hot rows on the device."},
                 {"window", &spec.window, 1, kMostCount, "1: one lookup before its update."}};
  for (const auto& [name, value] : strings) TF_RETURN_IF_ERROR(ctx->GetAttr(name, value));
  for (const auto& [name, value] : flags) TF_RETURN_IF_ERROR(ctx->GetAttr(name, value));
  for (const auto& number : numbers) {
    TF_RETURN_IF_ERROR(ctx->GetAttr(number.name, number.value));
    TF_RETURN_IF_ERROR(RequireIn(number.name, *number.value, number.least, number.most, number.remedy));
  }
  TF_RETURN_IF_ERROR(ctx->GetAttr("a", &a));
  TF_RETURN_IF_ERROR(ctx->GetAttr("b", &b));
  TF_RETURN_IF_ERROR(ctx->GetAttr("seeds", &seeds));
  TF_RETURN_IF_ERROR(RequireIn("the number of seeds", seeds.size(), 1, kMostSegments, "the number of tables."));
  TF_RETURN_IF_ERROR(ctx->GetAttr("hyperparameters", &parameters));
  const std::string refusal = ReadRule(rule, parameters.data(), parameters.size(), &spec.rule);
  if (!refusal.empty()) return absl::InvalidArgumentError(refusal);
  TF_RETURN_IF_ERROR(ctx->GetAttr("segment_names", &spec.names));
  if (!spec.names.empty() && spec.names.size() != seeds.size()) {
    return absl::InvalidArgumentError(absl::StrCat("segment_names must be empty or one for each of the ", seeds.size(),
                                                   " seeds, got ", spec.names.size(), "."));
  }
  auto known = StorageOf(storage);
  if (!known.ok()) return known.status();
  spec.dim = dim;
  spec.storage = *known;
  spec.a = a;
  spec.b = b;
  spec.seeds.assign(seeds.begin(), seeds.end());
  spec.distribution = DistributionOf(distribution);
  spec.unknown_zeros = unknown == "zeros";
  return ReadLimits(ctx, seeds.size(), &spec.limits);
}

}  // namespace fusedrec
