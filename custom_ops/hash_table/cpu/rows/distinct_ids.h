// Lists of ids with repeats, and how the repeats are dropped.
#ifndef FUSEDREC_HASH_TABLE_CPU_ROWS_DISTINCT_IDS_H_
#define FUSEDREC_HASH_TABLE_CPU_ROWS_DISTINCT_IDS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fusedrec {

using IdsBySegment = std::vector<std::vector<int64_t>>;

// Sorts ids and drops repeats.
inline void KeepDistinct(std::vector<int64_t>* ids) {
  std::sort(ids->begin(), ids->end());
  ids->erase(std::unique(ids->begin(), ids->end()), ids->end());
}

}  // namespace fusedrec

#endif  // FUSEDREC_HASH_TABLE_CPU_ROWS_DISTINCT_IDS_H_
