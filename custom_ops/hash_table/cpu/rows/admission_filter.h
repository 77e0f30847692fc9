// Counts how often ids without a row come, until an id has come often enough to get one.
//
// Counts are exact: one number per id in a KeyIndex, about 25 bytes. The caller calls one method at a time.
#pragma once

#include "common/hash.h"
#include "hash_table/cpu/rows/key_index.h"

namespace fusedrec {

class AdmissionFilter {
 public:
  // threshold: lookups that must bring an id. It is 1 for a segment without admission, whose filter is never called.
  // stagger: of the KeyIndex.
  AdmissionFilter(int64_t threshold, double stagger) : threshold_(threshold), counts_(stagger) {}

  // Returns whether an id without a row has come often enough with this lookup. The lookup then counts or forgets it, when
  // it can no longer fail.
  bool Admits(int64_t id) const {
    const uint32_t seen = counts_.Find(id, TableHash(id));
    return seen != kAbsent && seen + int64_t{1} >= threshold_;
  }
  void Count(int64_t id) {
    const uint64_t hash = TableHash(id);
    const uint32_t seen = counts_.Find(id, hash);
    if (seen != kAbsent) {
      counts_.Replace(id, hash, seen + 1);
      return;
    }
    // Without memory for one more count, the id is new again next time. That is no reason to stop the training.
    if (counts_.Reserve(1).ok()) counts_.Insert(id, hash, 1);
  }
  void Forget(int64_t id) { counts_.Remove(id, TableHash(id)); }
  // Sets the count of an id. Fails when there is no memory.
  absl::Status Set(int64_t id, uint32_t count) {
    const uint64_t hash = TableHash(id);
    counts_.Remove(id, hash);
    FUSEDREC_TRY(counts_.Reserve(1));
    counts_.Insert(id, hash, count);
    return absl::OkStatus();
  }
  // Halves all counts and forgets the ids that came once, as TinyLFU ages its counters.
  void Halve() {
    std::vector<std::pair<int64_t, uint32_t>> all;
    counts_.ForEach([&](int64_t id, uint32_t count) { all.emplace_back(id, count); });
    for (const auto& [id, count] : all) {
      if (count == 1) counts_.Remove(id, TableHash(id));
      if (count > 1) counts_.Replace(id, TableHash(id), count / 2);
    }
  }
  void Clear() { counts_.Clear(); }

  int64_t size() const { return counts_.size(); }
  size_t bytes() const { return counts_.bytes(); }
  // Calls visit(id, count) for every counted id.
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    counts_.ForEach(visit);
  }

 private:
  int64_t threshold_;
  KeyIndex counts_;  // id -> lookups so far
};

}  // namespace fusedrec
