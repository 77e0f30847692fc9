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

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
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

    FusedrecPoolMoves Moves();
  };

  HotRows(int64_t capacity, int64_t segments) : capacity_(capacity), index_(segments) {}

  bool is_on() const { return capacity_ > 0; }
  // The slot with the row of this header, or kNoRow.
  int64_t Find(const SegmentId& key, const RowHeader& header) const;
  // Plans the end of a batch, which has been trained or not. The pool changes when the device has moved the rows: Commit.
  absl::Status PlanEnd(const BatchRows& batch, bool trained, const HashTable& table, Plan* plan);
  void Commit(const Plan& plan);

  // Slots whose rows are newer than in host memory.
  std::vector<int64_t> Newer() const;
  const SegmentId& key(int64_t slot) const { return slots_[slot].key; }
  // Their rows have been written to host memory, with these versions.
  void NoteWritten(int64_t slot, uint32_t updated);
  void Clear();

 private:
  uint32_t SlotOf(const SegmentId& key) const { return index_[key.segment].Find(key.id, TableHash(key.id)); }
  // A slot for a row of this count, or kNoRow. *unused: slots that nobody has had, and this plan gives.
  int64_t Choose(uint32_t count, const HashTable& table, int64_t* unused);

  const int64_t capacity_;
  std::vector<Slot> slots_;  // of the slots that were ever given: memory follows use
  std::vector<KeyIndex> index_;  // by segment: id -> slot
  int64_t used_ = 0;             // slots that have rows: the first ones
  int64_t hand_ = 0;
  uint32_t plan_ = 0;
};

}  // namespace fusedrec
