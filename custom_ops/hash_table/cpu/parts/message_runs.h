// A message as runs of one source and segment, the units of work on it.
#pragma once

#include <atomic>

#include "common/hash.h"
#include "common/parallel.h"
#include "hash_table/table.h"

namespace fusedrec {

struct MessageRun {
  int64_t entry, position, count;  // of the first id: in the message, and among ids
  int64_t segment;
};

// Runs in order, cut into pieces of at most `most` ids.
inline std::vector<MessageRun> RunsOf(const Message& message, int64_t segments, int64_t most) {
  std::vector<MessageRun> runs;
  int64_t entry = 0, position = 0;
  for (const int32_t size : message.source_splits) {
    int64_t first = entry + segments;
    for (int64_t segment = 0; segment < segments; ++segment) {
      const int64_t count = message.entries[entry + segment];
      for (int64_t done = 0; done < count; done += most) {
        runs.push_back({first + done, position + done, std::min(most, count - done), segment});
      }
      first += count;
      position += count;
    }
    entry += size;
  }
  return runs;
}

// A number that tells messages apart by their ids, the segments of these and their order. Rows and handles of a look-ahead
// are given by position, so they serve no other message.
inline uint64_t FingerprintOf(const Message& message, int64_t segments, const ParallelFor& parallel_for) {
  constexpr int64_t kPiece = 16 * 1024, kCyclesOfId = 4;
  const std::vector<MessageRun> runs = RunsOf(message, segments, kPiece);
  const int64_t mean = runs.empty() ? 1 : message.num_ids / static_cast<int64_t>(runs.size()) + 1;
  std::atomic<uint64_t> all{0};
  parallel_for(runs.size(), kCyclesOfId * mean, [&](int64_t begin, int64_t end) {
    uint64_t sum = 0;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t* ids = &message.entries[runs[r].entry];
      for (int64_t i = 0; i < runs[r].count; ++i) sum += FingerprintOf(runs[r].segment, ids[i], runs[r].position + i);
    }
    all.fetch_add(sum, std::memory_order_relaxed);
  });
  return all.load();
}

}  // namespace fusedrec
