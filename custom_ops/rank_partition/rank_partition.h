// Sorts the unique ids of a fused group by owner rank and packs them into the exchange message; unpacks it at the owner.
//
// Source: the rankwise sort of FusedRec (section 3, "Embedding Route"). The categories travel in a header of counts. So
// the receiver knows the table of every id without a second collective and without bits stolen from the id.
//
// # Message
// One block per owner, in rank order; a block is [ counts[S] | ids ], ids grouped by segment, inside a segment in the
// order of unique_ids (the counting sort is stable). Example with R = 2, S = 2, owner = id mod 2:
//     unique_ids   7 4 3 | 3 8        unique_splits 0 3 5
//     message      1 1 4 8 | 2 1 7 3 3      send_splits 4 5
//     restore      2 0 3 | 4 1              (row of unique id u among the rows that come back, headers not counted)
//
// # At the owner
// Blocks arrive by source rank. UnpackMessage sorts the V ids by segment (sources in rank order inside a segment), and
// says where each received id went. One SegmentUnique then deduplicates across sources.
#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/parallel.h"

namespace fusedrec {

enum class Owner {
  kHashRange,  // HashRangeOwner: this project's own tables
  kTfra,       // TfraOwner: TFRA's tables
};

//   unique_ids    [U]    ids grouped by segment
//   unique_splits [S+1]  checked by the caller
//   message       [>= U + R * S]  out: blocks as above; entries after them become 0
//   send_splits   [R]    out: entries of each block, header included
//   id_splits     [R]    out: ids of each block
//   restore       [U]    out: see above
void RankPartition(absl::Span<const int64_t> unique_ids, absl::Span<const int64_t> unique_splits, Owner owner,
                   const ParallelFor& parallel_for, absl::Span<int64_t> message, absl::Span<int32_t> send_splits,
                   absl::Span<int32_t> id_splits, absl::Span<int32_t> restore);

// Checks that blocks of these sizes, each with a header of `num_segments` counts, fill a message of `entries`.
absl::Status CheckReceivedSplits(int64_t entries, absl::Span<const int32_t> received_splits, int64_t num_segments,
                                 const char* name = "received_splits");

// Checks that the counts of the block of `rank` add up to its ids.
absl::Status CheckHeader(int64_t rank, absl::Span<const int64_t> counts, int64_t num_ids);

// Both, for all blocks.
absl::Status CheckMessage(absl::Span<const int64_t> message, absl::Span<const int32_t> received_splits,
                          int64_t num_segments);

//   message         [V + R * S], checked by CheckMessage
//   ids             [V]    out: ids grouped by segment
//   segment_splits  [S+1]  out
//   position        [V]    out: index into `ids` of the v-th received id (order of arrival, headers not counted)
//   id_splits       [R]    out: ids received from each source
void UnpackMessage(absl::Span<const int64_t> message, absl::Span<const int32_t> received_splits,
                   absl::Span<int64_t> ids, absl::Span<int64_t> segment_splits, absl::Span<int32_t> position,
                   absl::Span<int32_t> id_splits);

}  // namespace fusedrec
