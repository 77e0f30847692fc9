// The key structure on a GPU: lines of 64 bytes, each with five keys and their rows (MTGRBoost, section 4.1).
//
// A line is one memory transaction and holds key and row side by side, so a known id costs one random read. Four lanes
// read a line together, 16 bytes each (grouped parallel probing). A warp has 32 ids, and each group has the four ids of its
// own lanes. It requests all four first lines before it looks at one.
//
// Every segment has its own lines, a power of two. An id probes the lines
//     hash + i * S,   S = (hash / 2^32) | 1
// This is eq. (5) of MTGRBoost with a line in the place of a thread group's slots. S is odd, so a probe visits all lines.
// A full line that an insertion had to pass carries a mark, which tells a search to go on. A search ends at a line without
// it, so at a load of 0.75 a known id takes 1.1 lines. Bits tell which places of a line are taken, not a key of a special
// value, so that all ids are ordinary.
//
// Searches, insertions and removals are separate launches, so a search never sees a changing line. Insertions are of
// distinct new keys, so one compare-and-swap takes a place and no thread waits.
#pragma once

#include "common/device.cuh"
#include "common/hash.h"

namespace fusedrec::device_table {

constexpr int kKeysPerLine = 5;
constexpr unsigned kTaken = 0x1f;      // bits of meta: places with a key
constexpr unsigned kOverflown = 0x20;  // a key that would begin or continue here lies further along
constexpr uint32_t kNowhere = 0xffffffffu;  // row of a key that is not there

struct __align__(64) Line {
  int64_t key[kKeysPerLine];
  uint32_t row[kKeysPerLine];
  unsigned meta;
};
static_assert(sizeof(Line) == 64, "four lanes read a line");

struct SegmentLines {
  Line* lines;    // null: no key yet
  uint64_t mask;  // number of lines - 1
};

// A group: four neighbouring lanes of a warp.
constexpr int kGroup = 4;
__device__ inline int GroupLane() { return static_cast<int>(threadIdx.x & (kGroup - 1)); }
__device__ inline unsigned GroupMask() { return 0xfu << (threadIdx.x & 28); }
template <typename T>
__device__ inline T FromGroup(T value, int lane) {
  return __shfl_sync(GroupMask(), value, lane, kGroup);
}

__device__ inline uint4 Quarter(const Line* line) {
  if (line == nullptr) return {0, 0, 0, 0};
  return reinterpret_cast<const uint4*>(line)[GroupLane()];
}

// Row of `key` in the line whose quarters the group holds; *meta: the line's.
__device__ inline uint32_t RowInLine(uint4 quarter, int64_t key, unsigned* meta) {
  const unsigned low = static_cast<unsigned>(key), high = static_cast<unsigned>(static_cast<uint64_t>(key) >> 32);
  const int lane = GroupLane();
  // Lanes 0, 1, 2 begin with keys 0, 2, 4; lanes 0, 1 go on with keys 1, 3.
  const int base = static_cast<int>(threadIdx.x & 28);
  const unsigned first = __ballot_sync(GroupMask(), lane < 3 && quarter.x == low && quarter.y == high) >> base & 7;
  const unsigned second = __ballot_sync(GroupMask(), lane < 2 && quarter.z == low && quarter.w == high) >> base & 3;
  *meta = FromGroup(quarter.w, 3);
  unsigned equal = (first & 1) | (second & 1) << 1 | (first & 2) << 1 | (second & 2) << 2 | (first & 4) << 2;
  equal &= *meta & kTaken;
  if (equal == 0) return kNowhere;
  const int place = __ffs(static_cast<int>(equal)) - 1;
  // Lane 2 ends with rows 0 and 1, lane 3 begins with rows 2, 3, 4.
  const uint32_t mine = lane == 2 ? (place == 0 ? quarter.z : quarter.w)
                                  : (place == 2 ? quarter.x : place == 3 ? quarter.y : quarter.z);
  return FromGroup(mine, place < 2 ? 2 : 3);
}

// Row of this lane's id, kNowhere where there is none. All lanes of a group call it; one without an id passes null.
__device__ inline uint32_t FindRow(const SegmentLines* segment, int64_t id, uint64_t hash) {
  const Line* lines = segment == nullptr ? nullptr : segment->lines;
  const uint64_t mask = segment == nullptr ? 0 : segment->mask;
  const uint64_t first = lines == nullptr ? 0 : reinterpret_cast<uint64_t>(lines + (hash & mask));
  uint4 quarters[kGroup];
#pragma unroll
  for (int k = 0; k < kGroup; ++k) quarters[k] = Quarter(reinterpret_cast<const Line*>(FromGroup(first, k)));
  uint32_t row = kNowhere;
#pragma unroll
  for (int k = 0; k < kGroup; ++k) {
    const int64_t key = FromGroup(id, k);
    unsigned meta;
    uint32_t found = RowInLine(quarters[k], key, &meta);
    if (found == kNowhere && (meta & kOverflown) != 0) {  // the same for all lanes of the group
      const Line* const from = reinterpret_cast<const Line*>(FromGroup(reinterpret_cast<uint64_t>(lines), k));
      const uint64_t other = FromGroup(hash, k), wrap = FromGroup(mask, k);
      uint64_t n = other;
      for (uint64_t visited = 0; visited < wrap && found == kNowhere && (meta & kOverflown) != 0; ++visited) {
        n += LineStep(other);
        found = RowInLine(Quarter(from + (n & wrap)), key, &meta);
      }
    }
    if (GroupLane() == k) row = found;
  }
  return row;
}

// Puts a key that is not there; the lines have a free place.
__device__ inline void InsertKey(Line* lines, uint64_t mask, int64_t key, uint64_t hash, uint32_t row) {
  uint64_t n = hash;
  for (uint64_t visited = 0; visited <= mask; ++visited, n += LineStep(hash)) {
    Line* const line = lines + (n & mask);
    unsigned meta = LoadFresh(&line->meta);
    while ((meta & kTaken) != kTaken) {
      const unsigned place = ~meta & (meta + 1);  // the lowest bit that is 0
      const unsigned seen = atomicCAS(&line->meta, meta, meta | place);
      if (seen == meta) {
        const int i = __ffs(static_cast<int>(place)) - 1;
        line->key[i] = key;
        line->row[i] = row;
        return;
      }
      meta = seen;
    }
    if ((meta & kOverflown) == 0) atomicOr(&line->meta, kOverflown);
  }
}

// Calls found(line, place) for a key that the lines hold.
template <typename Found>
__device__ inline void WithKey(Line* lines, uint64_t mask, int64_t key, uint64_t hash, const Found& found) {
  uint64_t n = hash;
  for (uint64_t visited = 0; visited <= mask; ++visited, n += LineStep(hash)) {
    Line* const line = lines + (n & mask);
    const unsigned meta = LoadFresh(&line->meta);
    for (int i = 0; i < kKeysPerLine; ++i) {
      if ((meta >> i & 1) != 0 && line->key[i] == key) {
        found(line, i);
        return;
      }
    }
    if ((meta & kOverflown) == 0) return;
  }
}

// Takes out a key that the lines hold. The marks of lines that it passed stay.
__device__ inline void RemoveKey(Line* lines, uint64_t mask, int64_t key, uint64_t hash) {
  WithKey(lines, mask, key, hash, [](Line* line, int i) { atomicAnd(&line->meta, ~(1u << i)); });
}

}  // namespace fusedrec::device_table
