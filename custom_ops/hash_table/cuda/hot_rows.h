// Which rows of a table in host memory lie in the pool of its device (buffer_cuda.h), and which of them host memory lacks.
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

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/hash.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cpu/rows/key_index.h"
#include "hash_table/cuda/buffer/buffer_cuda.h"

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
  // The end of a batch.
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

  // Slots whose rows are newer than in host memory.
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

}  // namespace fusedrec
