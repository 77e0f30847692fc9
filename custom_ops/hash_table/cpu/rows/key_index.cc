#include "hash_table/cpu/rows/key_index.h"

#include <algorithm>

namespace fusedrec {

absl::StatusOr<std::unique_ptr<KeyIndex::Lines>> KeyIndex::Lines::Make(uint64_t num_lines) {
  constexpr uint64_t kPagesFrom = (size_t{512} << 10) / sizeof(Line);
  auto lines = std::make_unique<Lines>();
  lines->mask_ = num_lines - 1;
  if (num_lines < kPagesFrom) {
    lines->heap_.reset(new Line[num_lines]());
    lines->data_ = lines->heap_.get();
  } else {
    auto pages = Pages::OfMemory(num_lines * sizeof(Line));
    if (!pages.ok()) return pages.status();
    lines->pages_ = *std::move(pages);
    // Zero bytes are lines without keys.
    lines->data_ = reinterpret_cast<Line*>(lines->pages_.data());
  }
  return lines;
}

struct KeyIndex::Place {
  Line* line;
  int position;
};

KeyIndex::~KeyIndex() { delete lines_.load(); }

size_t KeyIndex::bytes() const {
  const Lines* lines = lines_.load(std::memory_order_acquire);
  return lines == nullptr ? 0 : lines->bytes();
}

bool KeyIndex::FindPlace(int64_t key, uint64_t hash, Place* place) const {
  const Lines* lines = lines_.load(std::memory_order_relaxed);
  if (lines == nullptr) return false;
  for (uint64_t n = hash, visited = 0; visited < lines->size(); n += LineStep(hash), ++visited) {
    Line& line = (*lines)[n];
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
  const Lines* lines = lines_.load(std::memory_order_relaxed);
  const uint64_t have = lines == nullptr ? 0 : lines->size();
  uint64_t want = std::max<uint64_t>(have, 1);
  while (static_cast<double>(size_ + more) > max_load_ * kKeysPerLine * static_cast<double>(want)) want *= 2;
  // Removed keys leave marks that lengthen searches.
  const bool worn = overflown_ * 2 > static_cast<int64_t>(have) && removed_ * 4 > static_cast<int64_t>(have);
  return want > have || worn ? Rebuild(want, retired) : absl::OkStatus();
}

absl::Status KeyIndex::Rebuild(uint64_t num_lines, Retired* retired) {
  auto made = Lines::Make(num_lines);
  if (!made.ok()) return made.status();
  KeyIndex fresh;
  fresh.lines_.store(made->release());
  ForEach([&](int64_t key, uint32_t payload) { fresh.Insert(key, TableHash(key), payload); });
  Exchange(fresh.lines_.exchange(nullptr), retired);
  overflown_ = fresh.overflown_;
  removed_ = 0;
  return absl::OkStatus();
}

void KeyIndex::Insert(int64_t key, uint64_t hash, uint32_t payload) {
  const Lines& lines = *lines_.load(std::memory_order_relaxed);
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

void KeyIndex::Exchange(Lines* lines, Retired* retired) {
  std::unique_ptr<Lines> old(lines_.exchange(lines, std::memory_order_seq_cst));
  if (old != nullptr && retired != nullptr) retired->push_back(std::move(old));
}

void KeyIndex::Clear(Retired* retired) {
  Exchange(nullptr, retired);
  size_ = overflown_ = removed_ = 0;
}

}  // namespace fusedrec
