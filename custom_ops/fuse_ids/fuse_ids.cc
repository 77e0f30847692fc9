#include "fuse_ids/fuse_ids.h"

#include <algorithm>
#include <cmath>

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

void MakeBags(absl::Span<const int64_t> row_splits, int64_t bag_size, Combiner combiner, int64_t first_id,
              absl::Span<int64_t> splits, absl::Span<float> scale) {
  const auto scale_of = [combiner](int64_t ids) {
    const float n = static_cast<float>(std::max<int64_t>(ids, 1));
    return combiner == Combiner::kSum ? 1.0f : combiner == Combiner::kMean ? 1.0f / n : 1.0f / std::sqrt(n);
  };
  splits[0] = first_id;
  const int64_t bags = scale.size();
  if (row_splits.empty()) {  // all alike
    for (int64_t g = 0; g < bags; ++g) splits[g + 1] = first_id + (g + 1) * bag_size;
    std::fill(scale.begin(), scale.end(), scale_of(bag_size));
    return;
  }
  for (int64_t g = 0; g < bags; ++g) {
    splits[g + 1] = first_id + row_splits[g + 1];
    scale[g] = scale_of(splits[g + 1] - splits[g]);
  }
}

}  // namespace fusedrec
