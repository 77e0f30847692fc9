// The key structure of a table shard: id -> 32-bit payload (a row handle), exact, for any int64 id.
//
// # Layout
// Open addressing over lines of one cache line each: five keys, their five payloads, and a word that counts them. A key
// belongs into the line that the low bits of its hash name. A full line is marked as overflown, and the next one takes
// the key. Keys are kept apart from the rows they lead to (MTGRBoost, section 4.1), so growing moves 17 to 28 bytes per
// key and no row.
//
// # Probing
// From line to line by an odd step that is taken from the hash: MTGRBoost's grouped parallel probing (section 4.1, eq. 5
// and theorem 1) with the five slots of a line in the place of its group of threads. The number of lines is a power of
// two, so an odd step visits each of them. Eq. 5 takes the step from the key itself. Ours comes from bits of the hash
// that choose neither line nor shard, so keys in sequence do not walk in step.
//
// # Threads
// One writer at a time (the shard's mutex); any number of readers, without locks, at the same time:
// - an insertion writes key and payload after the last ones and then publishes the count;
// - a removal moves the line's last key into the gap, under an odd version number that makes readers look again;
// - growing builds new lines and swaps one pointer; the old ones are kept by the owner until no reader can see them.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "common/hash.h"
#include "common/try.h"
#include "hash_table/cpu/rows/pages.h"

namespace fusedrec {

constexpr uint32_t kAbsent = 0xffffffff;  // no key has this payload

class KeyIndex {
 public:
  static constexpr int kKeysPerLine = 5;

  struct Line;
  struct GiveBack {
    size_t bytes = 0;
    void operator()(Line* lines) const { GiveBackArray(lines, bytes); }
  };
  // Replaced lines, which wait until no reader looks at them.
  using Retired = std::vector<std::unique_ptr<Line[], GiveBack>>;

  // `stagger` in [0, 1) spreads the load at which indices of one table grow over 0.60 to 0.75. The shards of a table
  // fill evenly, and should not all grow in the same step.
  explicit KeyIndex(double stagger = 0.0) : max_load_(0.75 - 0.15 * stagger) {}
  KeyIndex(KeyIndex&& other) noexcept
      : max_load_(other.max_load_), lines_(other.lines_.exchange(0)), size_(other.size_),
        overflown_(other.overflown_), removed_(other.removed_) {}
  ~KeyIndex() { Clear(); }

  int64_t size() const { return size_; }
  size_t bytes() const;

  // Reads. Any thread.
  uint32_t Find(int64_t key, uint64_t hash) const;
  void Prefetch(uint64_t hash) const;

  // Writes. One thread at a time.
  // Makes room for `more` keys; replaced lines go to `retired`; null: nobody reads meanwhile.
  absl::Status Reserve(int64_t more, Retired* retired = nullptr);
  void Insert(int64_t key, uint64_t hash, uint32_t payload);   // not there yet; room was reserved
  void Replace(int64_t key, uint64_t hash, uint32_t payload);  // it is there
  uint32_t Remove(int64_t key, uint64_t hash);                 // its payload, or kAbsent
  void Clear(Retired* retired = nullptr);
  // Calls visit(key, payload) for every key, or until it returns false; it must not change the index. Keys come in the
  // order of the lines.
  template <typename Visit>
  void ForEach(const Visit& visit) const;

 private:
  class Lines;
  struct Place;
  bool FindPlace(int64_t key, uint64_t hash, Place* place) const;
  absl::Status Rebuild(uint64_t num_lines, Retired* retired);
  void Exchange(uint64_t lines, Retired* retired);

  double max_load_;
  std::atomic<uint64_t> lines_{0};  // see Lines
  int64_t size_ = 0;
  int64_t overflown_ = 0;  // lines with the mark
  int64_t removed_ = 0;    // keys removed since the lines were built: marks that nothing needs any more stay until then
};

struct alignas(64) KeyIndex::Line {
  static constexpr uint32_t kCount = 7, kOverflown = 8, kVersion = 16;  // bits of meta; the rest counts removals, twice
  std::atomic<int64_t> key[kKeysPerLine];
  std::atomic<uint32_t> payload[kKeysPerLine];
  std::atomic<uint32_t> meta;

  // Position of `key` among the first (meta & kCount) keys, or -1.
  int Position(int64_t wanted, uint32_t meta_seen) const {
    unsigned equal = 0;
    for (int i = 0; i < kKeysPerLine; ++i) equal |= unsigned{key[i].load(std::memory_order_acquire) == wanted} << i;
    equal &= (1u << (meta_seen & kCount)) - 1;
    return equal == 0 ? -1 : __builtin_ctz(equal);
  }
};

// Lines of one size, from one growth to the next. They are one word, which readers load at once: the address of the first
// line, and in its low bits the binary logarithm of their number. 0: there are none.
class KeyIndex::Lines {
 public:
  explicit Lines(uint64_t word) : word_(word) {}
  static absl::StatusOr<uint64_t> Make(uint64_t num_lines);
  Line* data() const { return reinterpret_cast<Line*>(word_ & ~uint64_t{63}); }
  Line& operator[](uint64_t n) const { return data()[n & (size() - 1)]; }
  uint64_t size() const { return word_ == 0 ? 0 : uint64_t{1} << (word_ & 63); }
  size_t bytes() const { return size() * sizeof(Line); }

 private:
  uint64_t word_;
};

inline void KeyIndex::Prefetch(uint64_t hash) const {
  const Lines lines(lines_.load(std::memory_order_seq_cst));
  if (lines.size() > 0) __builtin_prefetch(&lines[hash]);
}

inline uint32_t KeyIndex::Find(int64_t key, uint64_t hash) const {
  const Lines lines(lines_.load(std::memory_order_seq_cst));
  for (uint64_t n = hash, visited = 0; visited < lines.size(); n += LineStep(hash), ++visited) {
    const Line& line = lines[n];
    uint32_t meta, payload;
    do {  // again when a removal was under way
      meta = line.meta.load(std::memory_order_acquire);
      const int i = line.Position(key, meta);
      payload = i < 0 ? kAbsent : line.payload[i].load(std::memory_order_acquire);
    } while (__builtin_expect((meta & Line::kVersion) != 0 ||
                              (line.meta.load(std::memory_order_relaxed) ^ meta) >= Line::kVersion, false));
    if (payload != kAbsent) return payload;
    if ((meta & Line::kOverflown) == 0) return kAbsent;
  }
  return kAbsent;
}

template <typename Visit>
void KeyIndex::ForEach(const Visit& visit) const {
  const Lines lines(lines_.load(std::memory_order_acquire));
  for (uint64_t n = 0; n < lines.size(); ++n) {
    const Line& line = lines[n];
    const int count = line.meta.load(std::memory_order_relaxed) & Line::kCount;
    for (int i = 0; i < count; ++i) {
      const int64_t key = line.key[i].load(std::memory_order_relaxed);
      const uint32_t payload = line.payload[i].load(std::memory_order_relaxed);
      if constexpr (std::is_same_v<std::invoke_result_t<Visit, int64_t, uint32_t>, bool>) {
        if (!visit(key, payload)) return;
      } else {
        visit(key, payload);
      }
    }
  }
}

}  // namespace fusedrec
