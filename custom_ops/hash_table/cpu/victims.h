// Rows that may leave a table or its memory, and the choice of the lowest-ranked among them.
#ifndef FUSEDREC_HASH_TABLE_CPU_VICTIMS_H_
#define FUSEDREC_HASH_TABLE_CPU_VICTIMS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fusedrec {

struct Victim {
  uint64_t score;  // lowest leaves first
  uint64_t tie;    // a hash of the id: the same choice in any order of the scan
  int64_t id;
  int32_t shard;
  int32_t segment;
  bool operator<(const Victim& other) const { return score != other.score ? score < other.score : tie < other.tie; }
};

inline void KeepWorst(std::vector<Victim>* victims, int64_t count) {
  if (count >= static_cast<int64_t>(victims->size())) return;
  std::nth_element(victims->begin(), victims->begin() + count, victims->end());
  victims->resize(count);
}

}  // namespace fusedrec

#endif  // FUSEDREC_HASH_TABLE_CPU_VICTIMS_H_
