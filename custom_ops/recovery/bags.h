// What kernels of recovery check alike, whatever the device.
#ifndef FUSEDREC_RECOVERY_BAGS_H_
#define FUSEDREC_RECOVERY_BAGS_H_

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/kernel_util.h"
#include "recovery/recovery.h"

namespace fusedrec {

// index: in host memory.
inline absl::Status RequireIndex(absl::Span<const int32_t> index, int64_t rows) {
  const int64_t bad = FirstOutOfRange(index, rows);
  if (bad < 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("index[", bad, "] must lie in [0, ", rows, "), got ", index[bad],
                                                 ". Compose it from the outputs of SegmentUnique and RankPartition."));
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

#endif  // FUSEDREC_RECOVERY_BAGS_H_
