#include "hash_table/cuda/kernels/next_batch.h"

#include <cstddef>

#include "absl/types/span.h"
#include "common/hash.h"
#include "rank_partition/rank_partition.h"

namespace fusedrec {
namespace {

// A set of handles.
class HandleSet {
 public:
  explicit HandleSet(int64_t most) {
    while ((int64_t{1} << bits_) < 2 * most) ++bits_;
    slots_.assign(size_t{1} << bits_, kNobody);
  }
  // Returns whether the handle is new.
  bool Insert(int64_t handle) {
    const uint32_t wanted = static_cast<uint32_t>(handle), mask = static_cast<uint32_t>(slots_.size() - 1);
    for (uint32_t i = wanted * 0x9e3779b1u >> (32 - bits_);; i = (i + 1) & mask) {
      if (slots_[i] == wanted) return false;
      if (slots_[i] != kNobody) continue;
      slots_[i] = wanted;
      return true;
    }
  }

 private:
  static constexpr uint32_t kNobody = 0xffffffff;
  int bits_ = 1;
  std::vector<uint32_t> slots_;
};

// A set of distinct keys.
class KeySet {
 public:
  explicit KeySet(const std::vector<SegmentId>& keys) : keys_(keys) {
    size_t size = 1;
    while (size < 2 * keys.size()) size *= 2;
    slots_.assign(size, kNobody);
    for (size_t n = 0; n < keys.size(); ++n) slots_[Find(keys[n])] = static_cast<uint32_t>(n);
  }
  bool Has(const SegmentId& key) const { return slots_[Find(key)] != kNobody; }

 private:
  static constexpr uint32_t kNobody = 0xffffffff;

  // The slot with this key, or the free one where it is not.
  size_t Find(const SegmentId& key) const {
    for (size_t i = TableHash(key.id) + key.segment;; ++i) {
      const uint32_t n = slots_[i & (slots_.size() - 1)];
      if (n == kNobody || (keys_[n].id == key.id && keys_[n].segment == key.segment)) return i & (slots_.size() - 1);
    }
  }

  const std::vector<SegmentId>& keys_;
  std::vector<uint32_t> slots_;
};

}  // namespace

void NextBatch::GroupBySegment(int64_t segments) {
  const int64_t num_ids = handles.size();
  std::vector<int32_t> position(num_ids), id_splits(splits.size());
  ids.resize(num_ids);
  order.resize(num_ids);
  segment_splits.resize(segments + 1);
  UnpackMessage(entries, splits, absl::MakeSpan(ids), absl::MakeSpan(segment_splits), absl::MakeSpan(position),
                absl::MakeSpan(id_splits));
  for (int64_t v = 0; v < num_ids; ++v) order[position[v]] = v;
}

template <typename Visit, typename EndSegment>
void NextBatch::ForEachId(const Visit& visit, const EndSegment& end_segment) const {
  for (size_t s = 0; s + 1 < segment_splits.size(); ++s) {
    for (int64_t i = segment_splits[s]; i < segment_splits[s + 1]; ++i) {
      visit(SegmentId{static_cast<int64_t>(s), ids[i]}, order[i]);
    }
    end_segment();
  }
}

void NextBatch::ChooseAhead(const HashTable& table, const HotRows& pool, const std::vector<SegmentId>& waiting,
                            RowTransfers::Parcel* parcel, RowTransfers::Parcel* more) {
  HandleSet met(handles.size());
  const KeySet comes_back(waiting);
  // The device has the rows of `parcel`, then those of `more`, then the hot ones.
  Told of_more, of_pool;
  const auto choose = [&](const SegmentId& key, int64_t received) {
    const int64_t handle = handles[received];
    if (handle == kNoRow || !met.Insert(handle)) return;
    const int64_t slot = pool.Find(key, table.HeaderOf(handle));
    if (slot != kNoRow) {
      hot.ids.push_back(key.id);
      hot.slots.push_back(slot);
      of_pool.Add(key, received);
    } else if (comes_back.Has(key)) {
      more->Add(key.id, handle);
      of_more.Add(key, received);
    } else {
      parcel->Add(key.id, handle);
      told.Add(key, received);
    }
  };
  ForEachId(choose, [&] {
    parcel->EndSegment();
    more->EndSegment();
    hot.splits.push_back(hot.ids.size());
  });
  told.Append(of_more);
  told.Append(of_pool);
}

void NextBatch::ChooseLate(const HashTable& table, const ParallelFor& parallel_for, const std::vector<int32_t>& numbers,
                           const std::vector<int64_t>& found, RowTransfers::Parcel* parcel) {
  // Headers lie anywhere in memory, so several threads read them.
  constexpr int64_t kCyclesOfHeader = 100;
  std::vector<char> is_late(found.size());  // and not chosen yet
  parallel_for(found.size(), kCyclesOfHeader, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) is_late[n] = table.HeaderOf(found[n]).updated > version;
  });
  const auto choose = [&](const SegmentId& key, int64_t received) {
    const int32_t number = numbers[received];
    if (!is_late[number]) return;
    is_late[number] = false;
    parcel->Add(key.id, found[number]);
    if (handles[received] == kNoRow) told.Add(key, received);
  };
  ForEachId(choose, [&] { parcel->EndSegment(); });
}

}  // namespace fusedrec
