#include "segment_unique/segment_unique.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "common/hash.h"

namespace fusedrec {
namespace {

constexpr int64_t kAhead = 16;           // ids between the fetch of a slot and its use
constexpr int64_t kPartIds = 64 * 1024;  // a segment longer than this is cut into parts
constexpr uint32_t kMaxParts = 16;       // every part reads the whole segment, so few and large ones
constexpr int64_t kBlock = 16 * 1024;    // ids per block of passes 2 and 3
constexpr int64_t kCyclesPerId = 20;     // measured order of magnitude, for the pool's cost model

struct Item {
  int64_t begin, end;      // ids of the segment
  uint32_t part, parts;    // this item takes ids whose hash falls into `part` of `parts`
};

std::vector<Item> CutIntoItems(absl::Span<const int64_t> splits) {
  std::vector<Item> items;
  for (size_t s = 0; s + 1 < splits.size(); ++s) {
    const int64_t size = splits[s + 1] - splits[s];
    if (size == 0) continue;
    const uint32_t parts = static_cast<uint32_t>(std::min<int64_t>((size + kPartIds - 1) / kPartIds, kMaxParts));
    for (uint32_t p = 0; p < parts; ++p) items.push_back({splits[s], splits[s + 1], p, parts});
  }
  // Longest first: the pool hands items out in order, and a long one at the end would run alone.
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return a.end - a.begin > b.end - b.begin; });
  return items;
}

// Slots of one thread, reused from item to item: clearing is cheaper than allocating.
class SlotTable {
 public:
  // Makes room for `n` ids at load <= 1/2 and empties the table.
  void Reset(int64_t n) {
    bits_ = 4;
    while ((int64_t{1} << bits_) < 2 * n) ++bits_;
    const size_t size = size_t{1} << bits_;
    if (slots_.size() < size) slots_.resize(size);
    std::memset(slots_.data(), 0xff, size * sizeof(int32_t));
  }
  uint32_t SlotOf(uint64_t hash) const { return static_cast<uint32_t>(hash >> (64 - bits_)); }
  void Fetch(uint32_t slot) const { __builtin_prefetch(&slots_[slot], 1); }

  // Position that first held ids[n]; n itself when it is the first.
  int32_t FindOrInsert(const int64_t* ids, int32_t n, uint32_t slot) {
    const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << bits_) - 1);
    for (;; slot = (slot + 1) & mask) {
      const int32_t seen = slots_[slot];
      if (seen < 0) return slots_[slot] = n;
      if (ids[seen] == ids[n]) return seen;
    }
  }

 private:
  int bits_ = 4;
  std::vector<int32_t> slots_;
};

void FindFirstsOfSegment(const int64_t* ids, const Item& item, SlotTable* table, int32_t* first) {
  table->Reset(item.end - item.begin);
  uint32_t slots[kAhead];
  const int64_t lead = std::min(item.end, item.begin + kAhead);
  for (int64_t n = item.begin; n < lead; ++n) {
    table->Fetch(slots[n % kAhead] = table->SlotOf(SlotHash(ids[n])));
  }
  for (int64_t n = item.begin; n < item.end; ++n) {
    const uint32_t slot = slots[n % kAhead];
    if (n + kAhead < item.end) {
      table->Fetch(slots[n % kAhead] = table->SlotOf(SlotHash(ids[n + kAhead])));
    }
    first[n] = table->FindOrInsert(ids, static_cast<int32_t>(n), slot);
  }
}

// The ids of one part: gather their positions first, then treat them like a segment of their own. The part is
// chosen by the low half of the hash, slots by its high bits, so that the parts do not crowd their tables.
void FindFirstsOfPart(const int64_t* ids, const Item& item, SlotTable* table, int32_t* first) {
  std::vector<int32_t> mine;
  mine.reserve((item.end - item.begin) / item.parts * 5 / 4);
  for (int64_t n = item.begin; n < item.end; ++n) {
    if (RangeOf(SlotHash(ids[n]) << 32, item.parts) == item.part) mine.push_back(static_cast<int32_t>(n));
  }
  table->Reset(mine.size());
  for (size_t i = 0; i < mine.size(); ++i) {
    if (i + kAhead < mine.size()) table->Fetch(table->SlotOf(SlotHash(ids[mine[i + kAhead]])));
    first[mine[i]] = table->FindOrInsert(ids, mine[i], table->SlotOf(SlotHash(ids[mine[i]])));
  }
}

}  // namespace

int64_t SegmentUnique(absl::Span<const int64_t> ids, absl::Span<const int64_t> segment_splits,
                      const ParallelFor& parallel_for, absl::Span<int64_t> unique_ids,
                      absl::Span<int64_t> unique_splits, absl::Span<int32_t> inverse) {
  const int64_t num_ids = ids.size();
  const std::vector<Item> items = CutIntoItems(segment_splits);
  std::unique_ptr<int32_t[]> first(new int32_t[num_ids]);
  std::unique_ptr<int32_t[]> number(new int32_t[num_ids]);

  // Pass 1. Items differ in length, so threads take the next one when they are free instead of a fixed range.
  std::atomic<size_t> next{0};
  const int64_t mean_cost = items.empty() ? 1 : kCyclesPerId * num_ids / static_cast<int64_t>(items.size()) + 1;
  parallel_for(items.size(), mean_cost, [&](int64_t begin, int64_t end) {
    SlotTable table;
    for (int64_t turns = end - begin; turns > 0; --turns) {
      const Item& item = items[next.fetch_add(1)];
      if (item.parts == 1) {
        FindFirstsOfSegment(ids.data(), item, &table, first.get());
      } else {
        FindFirstsOfPart(ids.data(), item, &table, first.get());
      }
    }
  });

  // Pass 2. counts[b + 1]: first occurrences in block b; after the prefix sum, counts[b] numbers the block's first one.
  const int64_t blocks = (num_ids + kBlock - 1) / kBlock;
  std::vector<int64_t> counts(blocks + 1, 0);
  parallel_for(blocks, 2 * kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t last = std::min(num_ids, (b + 1) * kBlock);
      int64_t count = 0;
      for (int64_t n = b * kBlock; n < last; ++n) count += first[n] == n;
      counts[b + 1] = count;
    }
  });
  for (int64_t b = 0; b < blocks; ++b) counts[b + 1] += counts[b];
  parallel_for(blocks, 4 * kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t last = std::min(num_ids, (b + 1) * kBlock);
      int64_t u = counts[b];
      for (int64_t n = b * kBlock; n < last; ++n) {
        number[n] = static_cast<int32_t>(u);  // for a first occurrence its own; in general: firsts before n
        if (first[n] == n) unique_ids[u++] = ids[n];
      }
    }
  });
  const int64_t num_unique = counts[blocks];
  for (size_t s = 0; s < segment_splits.size(); ++s) {
    const int64_t n = segment_splits[s];
    unique_splits[s] = n < num_ids ? number[n] : num_unique;
  }

  // Pass 3.
  parallel_for(blocks, 6 * kBlock, [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(num_ids, end * kBlock);
    for (int64_t n = begin * kBlock; n < last; ++n) inverse[n] = number[first[n]];
  });
  return num_unique;
}

}  // namespace fusedrec
