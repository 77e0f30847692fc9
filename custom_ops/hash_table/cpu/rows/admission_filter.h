// Counts how often ids without a row come, until an id has come often enough to get one.
//
// Counts are exact: one number per id in a KeyIndex, about 25 bytes. The caller calls one method at a time.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "hash_table/cpu/rows/key_index.h"

namespace fusedrec {

class AdmissionFilter {
 public:
  // threshold: lookups that must bring an id. It is 1 for a segment without admission, whose filter is never called.
  // stagger: of the KeyIndex.
  AdmissionFilter(int64_t threshold, double stagger) : threshold_(threshold), counts_(stagger) {}

  // Returns whether an id without a row has come often enough with this lookup. The lookup then counts or forgets it, when
  // it can no longer fail.
  bool Admits(int64_t id) const;
  void Count(int64_t id);
  void Forget(int64_t id);
  // Sets the count of an id. Fails when there is no memory.
  absl::Status Set(int64_t id, uint32_t count);
  // Halves all counts and forgets the ids that came once, as TinyLFU ages its counters.
  void Halve();
  void Clear();

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
