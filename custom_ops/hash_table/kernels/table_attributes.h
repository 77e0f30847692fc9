// The attributes of the op HashTable as a TableSpec and an update rule.
#ifndef FUSEDREC_HASH_TABLE_KERNELS_TABLE_ATTRIBUTES_H_
#define FUSEDREC_HASH_TABLE_KERNELS_TABLE_ATTRIBUTES_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/kernel_util.h"
#include "common/limits.h"
#include "hash_table/cpu/hash_table.h"

namespace fusedrec {

struct TableAttributes {
  TableSpec spec;
  std::string rule;
  std::vector<float> hyperparameters;
};

inline absl::Status ReadAttributes(tensorflow::OpKernelConstruction* ctx, TableAttributes* read) {
  int64_t dim;
  float a, b;
  std::string storage, distribution, unknown, eviction;
  std::vector<int64_t> seeds;
  TableSpec& spec = read->spec;
  TF_RETURN_IF_ERROR(ctx->GetAttr("dim", &dim));
  TF_RETURN_IF_ERROR(ctx->GetAttr("seeds", &seeds));
  TF_RETURN_IF_ERROR(ctx->GetAttr("segment_names", &spec.names));
  if (!spec.names.empty() && spec.names.size() != seeds.size()) {
    return absl::InvalidArgumentError(absl::StrCat("segment_names must be empty or one for each of the ", seeds.size(),
                                                   " seeds, got ", spec.names.size(), "."));
  }
  TF_RETURN_IF_ERROR(ctx->GetAttr("storage", &storage));
  TF_RETURN_IF_ERROR(ctx->GetAttr("stochastic_rounding", &spec.stochastic_rounding));
  TF_RETURN_IF_ERROR(ctx->GetAttr("distribution", &distribution));
  TF_RETURN_IF_ERROR(ctx->GetAttr("a", &a));
  TF_RETURN_IF_ERROR(ctx->GetAttr("b", &b));
  TF_RETURN_IF_ERROR(ctx->GetAttr("unknown", &unknown));
  TF_RETURN_IF_ERROR(ctx->GetAttr("rule", &read->rule));
  TF_RETURN_IF_ERROR(ctx->GetAttr("hyperparameters", &read->hyperparameters));
  TF_RETURN_IF_ERROR(ctx->GetAttr("max_rows", &spec.max_rows));
  TF_RETURN_IF_ERROR(ctx->GetAttr("eviction", &eviction));
  TF_RETURN_IF_ERROR(ctx->GetAttr("ttl", &spec.ttl));
  TF_RETURN_IF_ERROR(ctx->GetAttr("admission_count", &spec.admission_count));
  TF_RETURN_IF_ERROR(ctx->GetAttr("max_candidates", &spec.max_candidates));
  TF_RETURN_IF_ERROR(ctx->GetAttr("record_tombstones", &spec.record_tombstones));
  TF_RETURN_IF_ERROR(ctx->GetAttr("hot_after", &spec.hot_after));
  TF_RETURN_IF_ERROR(ctx->GetAttr("memory_budget", &spec.memory_budget));
  TF_RETURN_IF_ERROR(ctx->GetAttr("tier_folder", &spec.tier_folder));
  TF_RETURN_IF_ERROR(ctx->GetAttr("window", &spec.window));
  TF_RETURN_IF_ERROR(ctx->GetAttr("averaged", &spec.averaged));
  TF_RETURN_IF_ERROR(ctx->GetAttr("host_rows", &spec.host_rows));
  TF_RETURN_IF_ERROR(RequireIn("dim", dim, 1, kMostColumns, "the columns of a row."));
  TF_RETURN_IF_ERROR(RequireIn("the number of seeds", seeds.size(), 1, kMostSegments, "the number of tables."));
  const std::pair<const char*, int64_t> counts[] = {
      {"max_rows", spec.max_rows},   {"ttl", spec.ttl}, {"max_candidates", spec.max_candidates},
      {"hot_after", spec.hot_after}, {"memory_budget", spec.memory_budget}};
  for (const auto& [name, count] : counts) {
    TF_RETURN_IF_ERROR(RequireIn(name, count, 0, kMostCount, "0, which sets no limit."));
  }
  TF_RETURN_IF_ERROR(RequireIn("admission_count", spec.admission_count, 1, kMostCount, "1 admits every id."));
  TF_RETURN_IF_ERROR(RequireIn("window", spec.window, 1, kMostCount, "1: one lookup before its update."));
  auto known = StorageOf(storage);
  if (!known.ok()) return known.status();
  spec.dim = dim;
  spec.storage = *known;
  spec.a = a;
  spec.b = b;
  spec.seeds.assign(seeds.begin(), seeds.end());
  spec.distribution = DistributionOf(distribution);
  spec.unknown_zeros = unknown == "zeros";
  spec.eviction = eviction == "lru" ? Eviction::kLru : eviction == "lfu" ? Eviction::kLfu : Eviction::kNone;
  return absl::OkStatus();
}

}  // namespace fusedrec

#endif  // FUSEDREC_HASH_TABLE_KERNELS_TABLE_ATTRIBUTES_H_
