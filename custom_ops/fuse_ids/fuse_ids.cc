#include "fuse_ids/fuse_ids.h"

#include <algorithm>

namespace fusedrec {

void FuseIds(const std::vector<absl::Span<const int64_t>>& features, absl::Span<const int64_t> segments,
             absl::Span<int64_t> fused, absl::Span<int64_t> segment_splits) {
  std::fill(segment_splits.begin(), segment_splits.end(), 0);
  auto to = fused.begin();
  for (size_t f = 0; f < features.size(); ++f) {
    to = std::copy(features[f].begin(), features[f].end(), to);
    segment_splits[segments[f] + 1] += features[f].size();
  }
  for (size_t s = 1; s < segment_splits.size(); ++s) segment_splits[s] += segment_splits[s - 1];
}

}  // namespace fusedrec
