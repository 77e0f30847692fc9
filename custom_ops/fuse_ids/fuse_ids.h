// Concatenates the ids of a group's features, segment by segment: step a.1 of FusedRec (section 3, "Embedding Fusion").
//
// One op replaces a cast, a shape, a concat and a cumulative sum per feature. It also refuses row_splits that do not
// describe their values, naming the feature, before anything is computed from them.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "fuse_ids/bag_scale.h"

namespace fusedrec {

//   features  ids of each feature; features of one segment are neighbours
//   fused     [N] out: ids of all features
void FuseIds(const std::vector<absl::Span<const int64_t>>& features, absl::Span<int64_t> fused);

//   sizes           [F] ids of each feature
//   segments        [F] segment of each feature, non-decreasing, in [0, S)
//   segment_splits  [S+1] out: segment s is fused[segment_splits[s]:segment_splits[s+1]]
void CountSegments(absl::Span<const int64_t> sizes, absl::Span<const int64_t> segments,
                   absl::Span<int64_t> segment_splits);

// Writes the bags of one feature. They follow the bags of the features before it.
//   row_splits  ends of its bags among its ids, from 0 on; empty: bags of bag_size ids
//   first_id    of the feature among all ids
//   splits      out: its bags + 1 entries, the first of which is first_id
//   scale       out: one entry for each bag
void MakeBags(absl::Span<const int64_t> row_splits, int64_t bag_size, Combiner combiner, int64_t first_id,
              absl::Span<int64_t> splits, absl::Span<float> scale);

}  // namespace fusedrec
