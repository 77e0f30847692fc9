#include "hash_table/cpu/parts/trained_ids.h"

#include <utility>

namespace fusedrec {

void TrainedIds::Add(const Message& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t* entry = message.entries.data();
  for (size_t source = 0; source < message.source_splits.size(); ++source) {
    const int64_t* counts = entry;
    entry += segments_;
    for (int64_t segment = 0; segment < segments_; ++segment) {
      ids_[segment].insert(ids_[segment].end(), entry, entry + counts[segment]);
      entry += counts[segment];
    }
  }
  for (int64_t segment = 0; segment < segments_; ++segment) {
    constexpr size_t kAlwaysKept = 1 << 16;
    if (ids_[segment].size() < kAlwaysKept + 2 * distinct_[segment]) continue;
    KeepDistinct(&ids_[segment]);
    distinct_[segment] = ids_[segment].size();
  }
}

IdsBySegment TrainedIds::Take() {
  IdsBySegment taken(segments_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ids_.swap(taken);
    distinct_.assign(segments_, 0);
  }
  for (std::vector<int64_t>& ids : taken) KeepDistinct(&ids);
  return taken;
}

}  // namespace fusedrec
