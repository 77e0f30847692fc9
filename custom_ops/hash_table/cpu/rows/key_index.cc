#include "hash_table/cpu/rows/key_index.h"

#include <algorithm>

namespace fusedrec {

// Zero bytes are lines without keys.
absl::StatusOr<uint64_t> KeyIndex::Lines::Make(uint64_t num_lines) {
  const auto array = TakeArray(num_lines * sizeof(Line));
  if (!array.ok()) return array.status();
  return reinterpret_cast<uint64_t>(*array) | __builtin_ctzll(num_lines);
}

struct KeyIndex::Place {
  Line* line;
  int position;
};

size_t KeyIndex::bytes() const { return Lines(lines_.load(std::memory_order_acquire)).bytes(); }

bool KeyIndex::FindPlace(int64_t key, uint64_t hash, Place* place) const {
  const Lines lines(lines_.load(std::memory_order_relaxed));
  for (uint64_t n = hash, visited = 0; visited < lines.size(); n += LineStep(hash), ++visited) {
    Line& line = lines[n];
    const uint32_t meta = line.meta.load(std::memory_order_relaxed);
    const int i = line.Position(key, meta);
    if (i >= 0) {
      *place = {&line, i};
      return true;
    }
    if ((meta & Line::kOverflown) == 0) return false;
  }
  return false;
}

absl::Status KeyIndex::Reserve(int64_t more, Retired* retired) {
  const uint64_t have = Lines(lines_.load(std::memory_order_relaxed)).size();
  uint64_t want = std::max<uint64_t>(have, 1);
  while (static_cast<double>(size_ + more) > max_load_ * kKeysPerLine * static_cast<double>(want)) want *= 2;
  // Removed keys leave marks that lengthen searches.
  const bool worn = overflown_ * 2 > static_cast<int64_t>(have) && removed_ * 4 > static_cast<int64_t>(have);
  return want > have || worn ? Rebuild(want, retired) : absl::OkStatus();
}

absl::Status KeyIndex::Rebuild(uint64_t num_lines, Retired* retired) {
  const auto made = Lines::Make(num_lines);
  if (!made.ok()) return made.status();
  KeyIndex fresh;
  fresh.lines_.store(*made);
  ForEach([&](int64_t key, uint32_t payload) { fresh.Insert(key, TableHash(key), payload); });
  Exchange(fresh.lines_.exchange(0), retired);
  overflown_ = fresh.overflown_;
  removed_ = 0;
  return absl::OkStatus();
}

void KeyIndex::Insert(int64_t key, uint64_t hash, uint32_t payload) {
  const Lines lines(lines_.load(std::memory_order_relaxed));
  for (uint64_t n = hash;; n += LineStep(hash)) {
    Line& line = lines[n];
    const uint32_t meta = line.meta.load(std::memory_order_relaxed);
    const int count = meta & Line::kCount;
    if (count < kKeysPerLine) {
      line.key[count].store(key, std::memory_order_release);
      line.payload[count].store(payload, std::memory_order_release);
      line.meta.store(meta + 1, std::memory_order_release);
      ++size_;
      return;
    }
    if ((meta & Line::kOverflown) == 0) {
      line.meta.store(meta | Line::kOverflown, std::memory_order_release);
      ++overflown_;
    }
  }
}

void KeyIndex::Replace(int64_t key, uint64_t hash, uint32_t payload) {
  Place place;
  if (FindPlace(key, hash, &place)) place.line->payload[place.position].store(payload, std::memory_order_release);
}

uint32_t KeyIndex::Remove(int64_t key, uint64_t hash) {
  Place place;
  if (!FindPlace(key, hash, &place)) return kAbsent;
  Line& line = *place.line;
  const uint32_t payload = line.payload[place.position].load(std::memory_order_relaxed);
  const uint32_t meta = line.meta.load(std::memory_order_relaxed);
  const int last = (meta & Line::kCount) - 1;
  line.meta.store(meta + Line::kVersion, std::memory_order_seq_cst);  // odd: readers look again
  line.key[place.position].store(line.key[last].load(std::memory_order_relaxed), std::memory_order_release);
  line.payload[place.position].store(line.payload[last].load(std::memory_order_relaxed), std::memory_order_release);
  line.meta.store(meta + 2 * Line::kVersion - 1, std::memory_order_release);
  --size_;
  ++removed_;
  return payload;
}

void KeyIndex::Exchange(uint64_t lines, Retired* retired) {
  const Lines old(lines_.exchange(lines, std::memory_order_seq_cst));
  Retired::value_type owned(old.data(), {old.bytes()});
  if (owned != nullptr && retired != nullptr) retired->push_back(std::move(owned));
}

void KeyIndex::Clear(Retired* retired) {
  Exchange(0, retired);
  size_ = overflown_ = removed_ = 0;
}

}  // namespace fusedrec
