#include "hash_table/cuda/next_batch.h"

#include "absl/container/flat_hash_set.h"
#include "absl/types/span.h"
#include "common/hash.h"
#include "rank_partition/rank_partition.h"

namespace fusedrec {
namespace {

// A hash of keys for absl's sets.
struct KeyHash {
  size_t operator()(const SegmentId& key) const { return TableHash(key.id) + key.segment; }
};
struct SameKey {
  bool operator()(const SegmentId& a, const SegmentId& b) const { return a.id == b.id && a.segment == b.segment; }
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
                            Parcel* parcel, Parcel* more) {
  absl::flat_hash_set<int64_t> met(handles.size());
  const absl::flat_hash_set<SegmentId, KeyHash, SameKey> comes_back(waiting.begin(), waiting.end(), waiting.size());
  // The device has the rows of `parcel`, then those of `more`, then the hot ones.
  Told of_more, of_pool;
  const auto choose = [&](const SegmentId& key, int64_t received) {
    const int64_t handle = handles[received];
    if (handle == kNoRow || !met.insert(handle).second) return;
    const int64_t slot = pool.Find(key, table.HeaderOf(handle));
    if (slot != kNoRow) {
      hot.ids.push_back(key.id);
      hot.slots.push_back(slot);
      of_pool.Add(key, received);
    } else if (comes_back.contains(key)) {
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
                           const std::vector<int64_t>& found, Parcel* parcel) {
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
