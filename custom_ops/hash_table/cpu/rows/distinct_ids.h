// Lists of ids with repeats, and how the repeats are dropped or met.
#pragma once

#include <algorithm>
#include <vector>

#include "common/hash.h"

namespace fusedrec {

using IdsBySegment = std::vector<std::vector<int64_t>>;

inline void KeepDistinct(std::vector<int64_t>* ids) {
  std::sort(ids->begin(), ids->end());
  ids->erase(std::unique(ids->begin(), ids->end()), ids->end());
}

// Returns the place of the first id that stood before, or -1.
inline int64_t FirstRepeat(const int64_t* ids, int64_t count) {
  constexpr uint32_t kNone = 0xffffffff;
  int64_t slots = 2;
  while (slots < 2 * count) slots *= 2;
  std::vector<uint32_t> places(slots, kNone);  // open addressing
  for (int64_t n = 0; n < count; ++n) {
    for (uint64_t i = SlotHash(ids[n]);; ++i) {
      uint32_t& place = places[i & static_cast<uint64_t>(slots - 1)];
      if (place == kNone) {
        place = static_cast<uint32_t>(n);
        break;
      }
      if (ids[place] == ids[n]) return n;
    }
  }
  return -1;
}

}  // namespace fusedrec
