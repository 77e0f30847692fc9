#include "rank_partition/rank_partition.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "common/hash.h"
#include "common/limits.h"
#include "common/try.h"

namespace fusedrec {

constexpr int64_t kBlock = 16 * 1024;  // ids per block of the counting sort

static uint32_t OwnerOf(int64_t id, Owner owner, uint32_t ranks) {
  return owner == Owner::kTfra ? TfraOwner(id, ranks) : HashRangeOwner(id, ranks);
}

void RankPartition(absl::Span<const int64_t> unique_ids, absl::Span<const int64_t> unique_splits, Owner owner,
                   const ParallelFor& parallel_for, absl::Span<int64_t> message, absl::Span<int32_t> send_splits,
                   absl::Span<int32_t> id_splits, absl::Span<int32_t> restore) {
  const int64_t num_ids = unique_ids.size();
  const int64_t segments = unique_splits.size() - 1;
  const int64_t ranks = send_splits.size();
  const int64_t blocks = (num_ids + kBlock - 1) / kBlock;

  // counts[b][r]: ids of block b that go to r. The owner is kept in `restore` until the final pass overwrites it.
  std::vector<int32_t> counts((blocks + 1) * ranks, 0);
  parallel_for(blocks, 8 * kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      int32_t* count = &counts[b * ranks];
      const int64_t last = std::min(num_ids, (b + 1) * kBlock);
      for (int64_t u = b * kBlock; u < last; ++u) {
        const uint32_t r = OwnerOf(unique_ids[u], owner, ranks);
        restore[u] = r;
        ++count[r];
      }
    }
  });

  // Exclusive prefix sums, owner-major: counts[b][r] becomes the row of block b's first id for r.
  int32_t row = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    const int32_t first = row;
    for (int64_t b = 0; b < blocks; ++b) row += std::exchange(counts[b * ranks + r], row);
    id_splits[r] = row - first;
    send_splits[r] = id_splits[r] + segments;
  }

  // Headers: segment s sends r the ids between its first and its last one. They are counted in parallel by segment.
  std::vector<int64_t> block_start(ranks);
  std::exclusive_scan(send_splits.begin(), send_splits.end(), block_start.begin(), int64_t{0});
  std::fill(message.begin() + num_ids + ranks * segments, message.end(), 0);
  parallel_for(segments, 2 * num_ids / std::max<int64_t>(segments, 1) + ranks, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      for (int64_t r = 0; r < ranks; ++r) message[block_start[r] + s] = 0;
      for (int64_t u = unique_splits[s]; u < unique_splits[s + 1]; ++u) ++message[block_start[restore[u]] + s];
    }
  });

  // Row `i` of owner r lies after the headers of owners 0 to r.
  parallel_for(blocks, 6 * kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      int32_t* next = &counts[b * ranks];
      const int64_t last = std::min(num_ids, (b + 1) * kBlock);
      for (int64_t u = b * kBlock; u < last; ++u) {
        const int32_t r = restore[u];
        restore[u] = next[r]++;
        message[restore[u] + (r + 1) * segments] = unique_ids[u];
      }
    }
  });
}

absl::Status CheckReceivedSplits(int64_t entries, absl::Span<const int32_t> received_splits, int64_t num_segments,
                                 const char* name) {
  int64_t start = 0;
  for (size_t r = 0; r < received_splits.size(); ++r) {
    const int64_t size = received_splits[r];
    if (size < num_segments || start + size > entries) {
      return Invalid(
          name, "[", r, "] must lie in [", num_segments, ", ", entries - start, "], got ", size, ".", kEqualRanks);
    }
    start += size;
  }
  if (start == entries) return absl::OkStatus();
  return Invalid(name, " must sum to the ", entries, " entries of message, got ", start, ".", kEqualRanks);
}

absl::Status CheckHeader(int64_t rank, absl::Span<const int64_t> counts, int64_t num_ids) {
  // Each count is bounded before it is added: a damaged header must not overflow the sum.
  int64_t ids = 0;
  for (size_t s = 0; s < counts.size(); ++s) {
    if (counts[s] < 0 || counts[s] > num_ids - ids) {
      return Invalid("message of rank ", rank, " counts ", counts[s], " ids in segment ", s, ", more than its ",
          num_ids, " ids allow.", kEqualRanks);
    }
    ids += counts[s];
  }
  if (ids == num_ids) return absl::OkStatus();
  return Invalid("message of rank ", rank, " counts ", ids, " ids but holds ", num_ids, ".", kEqualRanks);
}

absl::Status CheckMessage(absl::Span<const int64_t> message, absl::Span<const int32_t> received_splits,
                          int64_t num_segments) {
  FUSEDREC_TRY(CheckReceivedSplits(message.size(), received_splits, num_segments));
  int64_t start = 0;
  for (size_t r = 0; r < received_splits.size(); ++r) {
    const absl::Span<const int64_t> counts = message.subspan(start, num_segments);
    FUSEDREC_TRY(CheckHeader(r, counts, received_splits[r] - num_segments));
    start += received_splits[r];
  }
  return absl::OkStatus();
}

void UnpackMessage(absl::Span<const int64_t> message, absl::Span<const int32_t> received_splits,
                   absl::Span<int64_t> ids, absl::Span<int64_t> segment_splits, absl::Span<int32_t> position,
                   absl::Span<int32_t> id_splits) {
  const int64_t segments = segment_splits.size() - 1;
  std::fill(segment_splits.begin(), segment_splits.end(), 0);
  int64_t start = 0;
  for (size_t r = 0; r < received_splits.size(); ++r) {
    for (int64_t s = 0; s < segments; ++s) segment_splits[s + 1] += message[start + s];
    id_splits[r] = received_splits[r] - segments;
    start += received_splits[r];
  }
  for (int64_t s = 0; s < segments; ++s) segment_splits[s + 1] += segment_splits[s];

  std::vector<int64_t> next(segment_splits.begin(), segment_splits.end() - 1);
  start = 0;
  int64_t v = 0;
  for (size_t r = 0; r < received_splits.size(); ++r) {
    const int64_t* id = &message[start] + segments;
    for (int64_t s = 0; s < segments; ++s) {
      const int64_t count = message[start + s];
      std::copy(id, id + count, ids.begin() + next[s]);
      std::iota(position.data() + v, position.data() + v + count, static_cast<int32_t>(next[s]));
      v += count;
      next[s] += count;
      id += count;
    }
    start += received_splits[r];
  }
}

}  // namespace fusedrec
