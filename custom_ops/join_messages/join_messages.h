// Joins the messages of several lookups into one message for one all-to-all, and splits the received message again.
//
// An all-to-all has a fixed cost, which a small message does not repay. The lookups of a step (groups of tables,
// micro-batches) therefore send their ids together. The order of the ids of one lookup stays as RankPartition made it.
//
// # Layout
// A message has one block per rank, in rank order. The joined block of a rank holds its blocks of all lookups, in the
// order of the lookups. A block is [ counts[S] | ids ], see rank_partition.h. Example with R = 2 and two lookups, S = 1:
//     first     1 7 | 2 5 9        splits 2 3
//     second    2 4 4 | 0          splits 3 1
//     joined    1 7 2 4 4 | 2 5 9 0        splits 5 4
// The received message has no index. The header of a block gives the start of the next block.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace fusedrec {

// A message <int64>[P] and the entries of its blocks <int32>[R]. Entries after the last block are padding.
struct MessageView {
  absl::Span<const int64_t> entries;
  absl::Span<const int32_t> splits;
};

// Checks that all messages have blocks for the same ranks, and that all blocks lie inside their message.
absl::Status CheckBlocks(const std::vector<MessageView>& messages);

// Entries of all blocks of `messages`, which CheckBlocks has checked.
int64_t EntriesOf(const std::vector<MessageView>& messages);

// Adds up the entries of each joined block. Reads no entries.
//   messages  [L], checked by CheckBlocks
//   splits    [R]  out
void JoinSplits(const std::vector<MessageView>& messages, absl::Span<int32_t> splits);

//   messages  [L], checked by CheckBlocks
//   joined    [>= sum of all blocks]  out: entries after the last block become 0
void JoinMessages(const std::vector<MessageView>& messages, absl::Span<int64_t> joined);

// Reads the headers of a joined message.
//   joined    checked by CheckReceivedSplits (rank_partition.h)
//   segments  [L]      tables of each lookup, S_i
//   lengths   [L * R]  out: entries of the block of rank r in lookup i, at i * R + r
absl::Status ReadLengths(const MessageView& joined, absl::Span<const int64_t> segments, absl::Span<int32_t> lengths);

//   lengths  [L * R]  the result of ReadLengths
//   parts    [L]      out: the message of each lookup, not padded
void SplitMessages(const MessageView& joined, absl::Span<const int32_t> lengths,
                   const std::vector<absl::Span<int64_t>>& parts);

}  // namespace fusedrec
