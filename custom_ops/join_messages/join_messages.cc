#include "join_messages/join_messages.h"

#include <algorithm>

#include "common/limits.h"

namespace fusedrec {

absl::Status CheckBlocks(const std::vector<MessageView>& messages) {
  for (size_t i = 0; i < messages.size(); ++i) {
    const auto& [entries, splits] = messages[i];
    if (splits.size() != messages[0].splits.size()) {
      return Invalid("splits[", i, "] must have one entry per rank, ", messages[0].splits.size(),
          " like splits[0], got ", splits.size(), ". Partition all messages for the same ranks.");
    }
    int64_t left = entries.size();
    for (size_t r = 0; r < splits.size(); ++r) {
      if (splits[r] < 0 || splits[r] > left) {
        return Invalid("splits[", i, "][", r, "] must lie in [0, ", left, "], got ", splits[r],
            ". Pass the send_splits of rank_partition.");
      }
      left -= splits[r];
    }
  }
  return absl::OkStatus();
}

int64_t EntriesOf(const std::vector<MessageView>& messages) {
  int64_t total = 0;
  for (const MessageView& message : messages) {
    for (const int32_t count : message.splits) total += count;
  }
  return total;
}

void JoinSplits(const std::vector<MessageView>& messages, absl::Span<int32_t> splits) {
  std::fill(splits.begin(), splits.end(), 0);
  for (const MessageView& message : messages) {
    for (size_t r = 0; r < splits.size(); ++r) splits[r] += message.splits[r];
  }
}

void JoinMessages(const std::vector<MessageView>& messages, absl::Span<int64_t> joined) {
  std::vector<const int64_t*> from;
  for (const MessageView& message : messages) from.push_back(message.entries.data());
  auto to = joined.begin();
  for (size_t r = 0; r < messages[0].splits.size(); ++r) {
    for (size_t i = 0; i < messages.size(); ++i) {
      const int32_t count = messages[i].splits[r];
      to = std::copy(from[i], from[i] + count, to);
      from[i] += count;
    }
  }
  std::fill(to, joined.end(), 0);
}

absl::Status ReadLengths(const MessageView& joined, absl::Span<const int64_t> segments, absl::Span<int32_t> lengths) {
  const size_t ranks = joined.splits.size();
  int64_t at = 0;
  for (size_t r = 0; r < ranks; ++r) {
    const int64_t end = at + joined.splits[r];
    for (size_t i = 0; i < segments.size(); ++i) {
      // Each count is bounded before it is added: a damaged header must not overflow the sum.
      int64_t ids = 0, free = end - at - segments[i];
      for (int64_t s = 0; free >= 0 && s < segments[i]; ++s) {
        const int64_t count = joined.entries[at + s];
        if (count < 0 || count > free - ids) {
          return Invalid("message of rank ", r, " counts ", count, " ids in segment ", s, " of lookup ", i,
              ", more than the ", free - ids, " entries left allow.", kEqualRanks);
        }
        ids += count;
      }
      if (free < 0) {
        return Invalid("message of rank ", r, " must hold ", segments[i], " counts of lookup ", i, ", got ", end - at,
            " entries.", kEqualRanks);
      }
      lengths[i * ranks + r] = static_cast<int32_t>(segments[i] + ids);
      at += segments[i] + ids;
    }
    if (at != end) {
      return Invalid(
          "message of rank ", r, " must end after the last lookup, got ", end - at, " more entries.", kEqualRanks);
    }
  }
  return absl::OkStatus();
}

void SplitMessages(const MessageView& joined, absl::Span<const int32_t> lengths,
                   const std::vector<absl::Span<int64_t>>& parts) {
  const size_t ranks = joined.splits.size();
  std::vector<int64_t*> to;
  for (const absl::Span<int64_t> part : parts) to.push_back(part.data());
  const int64_t* from = joined.entries.data();
  for (size_t r = 0; r < ranks; ++r) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const int32_t count = lengths[i * ranks + r];
      to[i] = std::copy(from, from + count, to[i]);
      from += count;
    }
  }
}

}  // namespace fusedrec
