// What host_rows.cc knows of the rows on its device: the pool of hot rows (buffer_cuda.h), and the batch that comes next.
//
// FusedRec (section 4) keeps rows in device memory, host memory and a file. The rows of this pool are the ones that
// lookups bring most often, by the counts in the headers of rows (Limits::CountAt).
//
// # Who is hot
// At the end of its batch a row without a slot takes a free one, or the slot of a row with a lower count. It looks at
// kSample slots, from a hand that goes round, so a pool of kSample rows holds exactly the most frequent rows. Slots of the
// rows of this batch stay. A row that has left the table counts nothing; the hand notices it.
//
// # Rows that left
// An id may leave the table and come back with a new row while its old one lies in a slot. The version in the header of the
// new row is higher than `stamp`, so the slot is not read. The old row may still be written back: RowRecords::WriteTrained
// skips ids that left and records that are not newer.
#pragma once

#include "absl/container/flat_hash_set.h"
#include "common/hash.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cpu/rows/key_index.h"
#include "hash_table/cuda/buffer/buffer_cuda.h"
#include "rank_partition/rank_partition.h"

namespace fusedrec {

// Rows of a batch on the device, in their order there, and their handles in host memory.
struct BatchRows {
  std::vector<SegmentId> keys;
  std::vector<int64_t> handles;
};

class HotRows {
 public:
  static constexpr int64_t kSample = 8;

  // The row in a slot, as host memory has it.
  struct Slot {
    SegmentId key{0, 0};
    uint32_t stamp = 0;        // version of the row in host memory; a row that came later has a higher one
    uint32_t count = 0, last = 0;  // of its header
    uint32_t plan = 0;         // the last one that gave or kept the slot
    bool is_newer = false;     // than the row in host memory
  };
  struct Plan {
    std::vector<int64_t> leaving, kept, slots, dropped;  // as FusedrecPoolMoves has them
    std::vector<Slot> rows;                              // of `slots`
    std::vector<SegmentId> returning;                    // keys of leaving, then of dropped
    std::vector<int64_t> numbers;

    FusedrecPoolMoves Moves() {
      numbers.clear();
      for (const std::vector<int64_t>* part : {&leaving, &kept, &slots, &dropped}) {
        numbers.insert(numbers.end(), part->begin(), part->end());
      }
      return {numbers.data(), static_cast<int64_t>(leaving.size()), static_cast<int64_t>(kept.size()),
              static_cast<int64_t>(dropped.size())};
    }
  };

  HotRows(int64_t capacity, int64_t segments) : capacity_(capacity), index_(segments) {}

  bool is_on() const { return capacity_ > 0; }
  // The slot with the row of this header, or kNoRow.
  int64_t Find(const SegmentId& key, const RowHeader& header) const {
    const uint32_t slot = SlotOf(key);
    return slot == kAbsent || header.updated > slots_[slot].stamp ? kNoRow : int64_t{slot};
  }
  // Plans the end of a batch, which has been trained or not. The pool changes when the device has moved the rows: Commit.
  absl::Status PlanEnd(const BatchRows& batch, bool trained, const HashTable& table, Plan* plan) {
    ++plan_;
    const auto keep = [&](int64_t n, int64_t slot, bool is_newer) {
      const RowHeader& header = table.HeaderOf(batch.handles[n]);
      plan->kept.push_back(n);
      plan->slots.push_back(slot);
      plan->rows.push_back({batch.keys[n], header.updated, header.count, header.last, plan_, is_newer || trained});
      slots_[slot].plan = plan_;
    };
    std::vector<int64_t> others, fresh(index_.size(), 0);
    for (int64_t n = 0; n < static_cast<int64_t>(batch.keys.size()); ++n) {
      const uint32_t slot = SlotOf(batch.keys[n]);
      if (slot == kAbsent) {
        others.push_back(n);
      } else {
        keep(n, slot, slots_[slot].is_newer);
      }
    }
    int64_t unused = 0;
    std::vector<SegmentId> dropped;
    for (const int64_t n : others) {
      const int64_t slot = Choose(table.HeaderOf(batch.handles[n]).count, table, &unused);
      if (slot == kNoRow) {
        if (!trained) continue;
        plan->leaving.push_back(n);
        plan->returning.push_back(batch.keys[n]);
        continue;
      }
      if (slot < used_ && slots_[slot].is_newer) {
        plan->dropped.push_back(slot);
        dropped.push_back(slots_[slot].key);
      }
      keep(n, slot, false);
      ++fresh[batch.keys[n].segment];
    }
    plan->returning.insert(plan->returning.end(), dropped.begin(), dropped.end());
    for (size_t s = 0; s < index_.size(); ++s) FUSEDREC_TRY(index_[s].Reserve(fresh[s]));
    return absl::OkStatus();
  }
  void Commit(const Plan& plan) {
    for (size_t i = 0; i < plan.rows.size(); ++i) {
      const int64_t at = plan.slots[i];
      const Slot &row = plan.rows[i], &before = slots_[at];
      const bool stays = at < used_ && before.key == row.key;
      if (!stays) {
        if (at < used_) index_[before.key.segment].Remove(before.key.id, TableHash(before.key.id));
        index_[row.key.segment].Insert(row.key.id, TableHash(row.key.id), static_cast<uint32_t>(at));
      }
      used_ = std::max(used_, at + 1);
      slots_[at] = row;
    }
  }

  std::vector<int64_t> Newer() const {
    std::vector<int64_t> newer;
    for (int64_t slot = 0; slot < used_; ++slot) {
      if (slots_[slot].is_newer) newer.push_back(slot);
    }
    return newer;
  }
  const SegmentId& key(int64_t slot) const { return slots_[slot].key; }
  // Their rows have been written to host memory, with these versions.
  void NoteWritten(int64_t slot, uint32_t updated) {
    slots_[slot].stamp = std::max(slots_[slot].stamp, updated);
    slots_[slot].is_newer = false;
  }
  void Clear() {
    for (KeyIndex& index : index_) index.Clear();
    slots_.clear();
    used_ = hand_ = 0;
  }

 private:
  uint32_t SlotOf(const SegmentId& key) const { return index_[key.segment].Find(key.id, TableHash(key.id)); }
  // A slot for a row of this count, or kNoRow. *unused: slots that nobody has had, and this plan gives.
  int64_t Choose(uint32_t count, const HashTable& table, int64_t* unused) {
    const int64_t capacity = capacity_;
    if (used_ + *unused < capacity) {
      const int64_t slot = used_ + (*unused)++;
      if (slot >= static_cast<int64_t>(slots_.size())) slots_.resize(slot + 1);
      return slot;
    }
    int64_t lowest = kNoRow;
    uint32_t its_count = 0;
    for (int64_t i = 0; i < std::min(kSample, capacity); ++i) {
      const int64_t at = (hand_ + i) % capacity;
      Slot* slot = &slots_[at];
      if (slot->plan == plan_) continue;
      if (i == 0 && table.HandleOf(slot->key) == kNoRow) slot->count = 0;
      const uint32_t now = table.spec().limits[slot->key.segment].CountAt(slot->count, slot->last, table.clock());
      if (lowest != kNoRow && now >= its_count) continue;
      lowest = at;
      its_count = now;
    }
    hand_ = (hand_ + 1) % capacity;
    return lowest != kNoRow && its_count < count ? lowest : kNoRow;
  }

  const int64_t capacity_;
  std::vector<Slot> slots_;  // of the slots that were ever given: memory follows use
  std::vector<KeyIndex> index_;  // by segment: id -> slot
  int64_t used_ = 0;             // slots that have rows: the first ones
  int64_t hand_ = 0;
  uint32_t plan_ = 0;
};

// Rows for the device, by segment.
struct Parcel {
  std::vector<int64_t> ids, handles, splits{0};
  char* records = nullptr;  // in page-locked memory

  void Add(int64_t id, int64_t handle) {
    ids.push_back(id);
    handles.push_back(handle);
  }
  void EndSegment() { splits.push_back(ids.size()); }
};

// The batch that comes next: its ids, by segment, and the rows that the device must get for it.
struct NextBatch {
  // Rows that the device has, in their order there, and a received id of each.
  struct Told {
    std::vector<SegmentId> keys;
    std::vector<int64_t> received;

    void Add(const SegmentId& key, int64_t its_received) {
      keys.push_back(key);
      received.push_back(its_received);
    }
    void Append(const Told& others) {
      keys.insert(keys.end(), others.keys.begin(), others.keys.end());
      received.insert(received.end(), others.received.begin(), others.received.end());
    }
  };
  struct Hot {
    std::vector<int64_t> ids, slots, splits{0};

    FusedrecHotRows view() const { return {ids.data(), splits.data(), slots.data()}; }
  };

  NextBatch() = default;
  explicit NextBatch(const Message& message)
      : entries(message.entries.size()), splits(message.source_splits.begin(), message.source_splits.end()),
        handles(message.num_ids, kNoRow) {}

  int64_t look_ahead = 0;  // number of the look-ahead that has sent the rows; 0: none has
  std::vector<int64_t> entries;
  std::vector<int32_t> splits;
  std::vector<int64_t> handles;    // [V]  rows as the look-ahead found them, kNoRow for none
  int64_t version = 0, moves = 0;  // of the table then
  uint64_t fingerprint = 0;        // of the message
  std::vector<int64_t> ids, segment_splits, order;  // by segment: ids, and which received one each is
  Told told;
  Hot hot;

  Message message() const { return {entries, splits, static_cast<int64_t>(handles.size())}; }
  Ahead ahead() const { return {handles, version, moves, fingerprint}; }
  void GroupBySegment(int64_t segments) {
    const int64_t num_ids = handles.size();
    std::vector<int32_t> position(num_ids), id_splits(splits.size());
    ids.resize(num_ids);
    order.resize(num_ids);
    segment_splits.resize(segments + 1);
    UnpackMessage(entries, splits, absl::MakeSpan(ids), absl::MakeSpan(segment_splits), absl::MakeSpan(position),
                  absl::MakeSpan(id_splits));
    for (int64_t v = 0; v < num_ids; ++v) order[position[v]] = v;
  }
  // Chooses the rows that the look-ahead found: of the pool, for `parcel`, or for `more` if they are among `waiting`, whose
  // state in host memory is old.
  void ChooseAhead(const HashTable& table, const HotRows& pool, const std::vector<SegmentId>& waiting, Parcel* parcel,
                   Parcel* more) {
    absl::flat_hash_set<int64_t> met(handles.size());
    const absl::flat_hash_set<SegmentId> comes_back(waiting.begin(), waiting.end(), waiting.size());
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
  // Chooses the rows that have changed since. numbers [V], found: inverse and handles of the lookup.
  void ChooseLate(const HashTable& table, const ParallelFor& parallel_for, const std::vector<int32_t>& numbers,
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

 private:
  // Calls visit(key, received) for all ids, and end_segment() behind the ids of each segment.
  template <typename Visit, typename EndSegment>
  void ForEachId(const Visit& visit, const EndSegment& end_segment) const {
    for (size_t s = 0; s + 1 < segment_splits.size(); ++s) {
      for (int64_t i = segment_splits[s]; i < segment_splits[s + 1]; ++i) {
        visit(SegmentId{static_cast<int64_t>(s), ids[i]}, order[i]);
      }
      end_segment();
    }
  }
};

}  // namespace fusedrec
