#include "hash_table/cuda/kernels/next_batch.h"

#include <cstddef>

#include "absl/types/span.h"
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

void NextBatch::ChooseAhead(const HashTable& table, const HotRows& pool, RowTransfers::Parcel* parcel) {
  HandleSet met(handles.size());
  const auto choose = [&](const SegmentId& key, int64_t received) {
    const int64_t handle = handles[received];
    if (handle == kNoRow || !met.Insert(handle)) return;
    const int64_t slot = pool.Find(key, table.HeaderOf(handle));
    if (slot != kNoRow) {
      hot.ids.push_back(key.id);
      hot.slots.push_back(slot);
      hot.received.push_back(received);
      return;
    }
    parcel->Add(key.id, handle);
    Tell(key, received);
  };
  ForEachId(choose, [&] {
    parcel->EndSegment();
    hot.splits.push_back(hot.ids.size());
  });
  for (size_t s = 0; s + 1 < hot.splits.size(); ++s) {
    for (int64_t i = hot.splits[s]; i < hot.splits[s + 1]; ++i) {
      Tell({static_cast<int64_t>(s), hot.ids[i]}, hot.received[i]);
    }
  }
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
    if (handles[received] == kNoRow) Tell(key, received);
  };
  ForEachId(choose, [&] { parcel->EndSegment(); });
}

}  // namespace fusedrec
