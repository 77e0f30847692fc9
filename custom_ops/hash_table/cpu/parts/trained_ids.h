// Collects the ids that one replica of a table has trained since it was last asked. Any thread may call any method.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "hash_table/cpu/rows/distinct_ids.h"
#include "hash_table/table_spec.h"

namespace fusedrec {

class TrainedIds {
 public:
  explicit TrainedIds(int64_t segments) : segments_(segments), ids_(segments), distinct_(segments, 0) {}

  // Adds the ids of a message.
  void Add(const Message& message);
  // Returns the distinct ids of each segment, ascending, and forgets them.
  IdsBySegment Take();
  void Clear() { Take(); }

 private:
  const int64_t segments_;
  std::mutex mutex_;
  IdsBySegment ids_;              // with repeats
  std::vector<size_t> distinct_;  // by segment: ids that were left when repeats were last dropped
};

}  // namespace fusedrec
