// Deduplicates ids inside each segment of a fused group, keeping first-occurrence order.
//
// Source: the segment unique of FusedRec (paper, section 3, Fig. 5), here for a CPU. A segment holds the ids of one
// table; equal ids of different segments are different rows and both stay.
//
// # How
// The work is cut into items (segment, part). A short segment is one item. A long one is cut into parts by hash. Every
// occurrence of an id falls into the same part, so parts need no locks. Three passes:
//   1. items in parallel: an open-addressing table of positions finds, for every n, the first position that holds
//      the same id: first[n] <= n, and first[n] == n exactly for first occurrences.
//   2. blocks in parallel: count the first occurrences, a prefix sum over blocks, number them in order of n.
//   3. blocks in parallel: inverse[n] = number of first[n].
// The result depends on the ids alone, not on the number of threads or parts.
//
// # Memory
// A table has 2^k >= 2 * (ids of the item) int32 slots, so load is at most 1/2 and probe chains stay short. first[] and
// number[] are N int32 each. Slots are found SlotHash-high-bits first and fetched kAhead ids early. The table of a long
// segment does not fit a cache, so the pass would otherwise wait for memory at every id.
#pragma once

#include "absl/types/span.h"
#include "common/parallel.h"

namespace fusedrec {

//   ids            [N]    any int64 value; negative ids are ordinary ids here; N < 2^31
//   segment_splits [S+1]  non-decreasing, starts at 0, ends at N (caller checks)
//   unique_ids     [N]    out: the first U entries, grouped by segment, in order of first occurrence
//   unique_splits  [S+1]  out: segment bounds inside unique_ids
//   inverse        [N]    out: unique_ids[inverse[n]] == ids[n]
//
// Returns U.
int64_t SegmentUnique(absl::Span<const int64_t> ids, absl::Span<const int64_t> segment_splits,
                      const ParallelFor& parallel_for, absl::Span<int64_t> unique_ids,
                      absl::Span<int64_t> unique_splits, absl::Span<int32_t> inverse);

}  // namespace fusedrec
