#include "hash_table/cpu/rows/admission_filter.h"

#include <utility>
#include <vector>

#include "common/hash.h"

namespace fusedrec {

bool AdmissionFilter::Admits(int64_t id) const {
  const uint32_t seen = counts_.Find(id, TableHash(id));
  return seen != kAbsent && seen + int64_t{1} >= threshold_;
}

void AdmissionFilter::Count(int64_t id) {
  const uint64_t hash = TableHash(id);
  const uint32_t seen = counts_.Find(id, hash);
  if (seen != kAbsent) {
    counts_.Replace(id, hash, seen + 1);
    return;
  }
  // Without memory for one more count, the id is new again next time. That is no reason to stop the training.
  KeyIndex::Retired retired;
  if (counts_.Reserve(1, &retired).ok()) counts_.Insert(id, hash, 1);
}

void AdmissionFilter::Forget(int64_t id) { counts_.Remove(id, TableHash(id)); }

void AdmissionFilter::Halve() {
  std::vector<std::pair<int64_t, uint32_t>> all;
  counts_.ForEach([&](int64_t id, uint32_t count) { all.emplace_back(id, count); });
  for (const auto& [id, count] : all) {
    if (count == 1) counts_.Remove(id, TableHash(id));
    if (count > 1) counts_.Replace(id, TableHash(id), count / 2);
  }
}

absl::Status AdmissionFilter::Set(int64_t id, uint32_t count) {
  const uint64_t hash = TableHash(id);
  counts_.Remove(id, hash);
  KeyIndex::Retired retired;
  const absl::Status reserved = counts_.Reserve(1, &retired);
  if (reserved.ok()) counts_.Insert(id, hash, count);
  return reserved;
}

void AdmissionFilter::Clear() {
  KeyIndex::Retired retired;
  counts_.Clear(&retired);
}

}  // namespace fusedrec
