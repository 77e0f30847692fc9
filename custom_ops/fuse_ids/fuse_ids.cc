#include "fuse_ids/fuse_ids.h"

#include <algorithm>

namespace fusedrec {

void FuseIds(const std::vector<absl::Span<const int64_t>>& features, absl::Span<int64_t> fused) {
  auto to = fused.begin();
  for (const absl::Span<const int64_t> feature : features) to = std::copy(feature.begin(), feature.end(), to);
}

void CountSegments(absl::Span<const int64_t> sizes, absl::Span<const int64_t> segments,
                   absl::Span<int64_t> segment_splits) {
  std::fill(segment_splits.begin(), segment_splits.end(), 0);
  for (size_t f = 0; f < sizes.size(); ++f) segment_splits[segments[f] + 1] += sizes[f];
  for (size_t s = 1; s < segment_splits.size(); ++s) segment_splits[s] += segment_splits[s - 1];
}

void MakeBags(absl::Span<const int64_t> row_splits, int64_t bag_size, Combiner combiner, int64_t first_id,
              absl::Span<int64_t> splits, absl::Span<float> scale) {
  splits[0] = first_id;
  const int64_t bags = scale.size();
  if (row_splits.empty()) {  // all alike
    for (int64_t g = 0; g < bags; ++g) splits[g + 1] = first_id + (g + 1) * bag_size;
    std::fill(scale.begin(), scale.end(), ScaleOfBag(combiner, bag_size));
    return;
  }
  for (int64_t g = 0; g < bags; ++g) {
    splits[g + 1] = first_id + row_splits[g + 1];
    scale[g] = ScaleOfBag(combiner, splits[g + 1] - splits[g]);
  }
}

}  // namespace fusedrec
