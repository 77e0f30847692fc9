// Checks that the CPU and GPU kernels of recovery share.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/bucket.h"
#include "common/kernel_util.h"
#include "common/limits.h"
#include "recovery/recovery.h"

namespace fusedrec {

// index: in host memory.
inline absl::Status RequireIndex(absl::Span<const int32_t> index, int64_t rows) {
  const int64_t bad = FirstOutOfRange(index, rows);
  if (bad < 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("index[", bad, "] must lie in [0, ", rows, "), got ", index[bad],
                                                 ". Compose it from the outputs of SegmentUnique and RankPartition."));
}

// num_rows, in host memory, and the rows of a gradient with its padding.
inline absl::Status ReadNumRows(const tensorflow::Tensor& num_rows, bool pad, int64_t* rows, int64_t* out_rows) {
  TF_RETURN_IF_ERROR(RequireRank("num_rows", num_rows, 0));
  *rows = num_rows.scalar<int64_t>()();
  TF_RETURN_IF_ERROR(RequireIn("num_rows", *rows, 0, kMostPositions, "the number of rows that were read from."));
  *out_rows = pad ? BucketedSize(*rows) : *rows;
  return absl::OkStatus();
}

// Rows in several parts; *rows: of all.
inline absl::Status RequireParts(const tensorflow::OpInputList& parts, int64_t* rows) {
  *rows = 0;
  for (int i = 0; i < parts.size(); ++i) {
    TF_RETURN_IF_ERROR(RequireRank(absl::StrCat("rows[", i, "]").c_str(), parts[i], 2));
    if (parts[i].dim_size(1) != parts[0].dim_size(1)) {
      return absl::InvalidArgumentError(absl::StrCat("rows[", i, "] must have the ", parts[0].dim_size(1),
                                                     " columns of rows[0], got ", parts[i].dim_size(1),
                                                     ". Pass parts of the same rows."));
    }
    *rows += parts[i].dim_size(0);
  }
  return absl::OkStatus();
}

// bag_splits [G + 1] and bag_scale [G].
inline absl::Status RequireBagShapes(const tensorflow::Tensor& splits, const tensorflow::Tensor& scale) {
  TF_RETURN_IF_ERROR(RequireRank("bag_splits", splits, 1));
  TF_RETURN_IF_ERROR(RequireRank("bag_scale", scale, 1));
  if (splits.NumElements() == 0) {
    return absl::InvalidArgumentError("bag_splits must have at least one entry, got none. It begins with 0.");
  }
  if (scale.NumElements() + 1 == splits.NumElements()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("bag_scale must have one entry for each of the ",
                                                 splits.NumElements() - 1, " bags, got ", scale.NumElements(), "."));
}

}  // namespace fusedrec
