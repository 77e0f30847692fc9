// A message as runs of one source and segment, which are the units of work on it.
#ifndef FUSEDREC_HASH_TABLE_CPU_PARTS_MESSAGE_RUNS_H_
#define FUSEDREC_HASH_TABLE_CPU_PARTS_MESSAGE_RUNS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "hash_table/table_spec.h"

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

}  // namespace fusedrec

#endif  // FUSEDREC_HASH_TABLE_CPU_PARTS_MESSAGE_RUNS_H_
