// A stable sort by small keys on the CPU: it counts, then places.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fusedrec {

// Calls place(n, to) for each item n in [0, items), in this order. The items of key k have the places begin[k] up to
// begin[k + 1], in the order of n.
//   key_of(n)  in [0, keys)
//   begin      [keys + 2]  out
template <typename Place, typename KeyOf, typename Begin>
void CountingSort(int64_t items, int64_t keys, const KeyOf& key_of, Begin* begin, const Place& place) {
  // Counts are two entries ahead, and begins one entry ahead while items are placed, which moves them to their entry.
  std::fill_n(begin, keys + 2, 0);
  for (int64_t n = 0; n < items; ++n) ++begin[key_of(n) + 2];
  for (int64_t k = 0; k < keys; ++k) begin[k + 2] += begin[k + 1];
  for (int64_t n = 0; n < items; ++n) place(n, begin[key_of(n) + 1]++);
}

}  // namespace fusedrec
