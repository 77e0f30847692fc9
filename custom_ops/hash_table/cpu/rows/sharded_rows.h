// The ids of a table and their rows, in shards: the store on which the other parts of a table work.
//
// # Shards
// The high bits of TableHash(id) choose one of 64 shards. They are independent of the bits that chose the owner rank. A
// shard has one KeyIndex per segment and free rows of its own. One thread at a time changes a shard; it takes the mutex
// once per batch, not per id. So many threads work on one batch, and the result does not depend on their order. Reading
// takes no lock at all (key_index.h).
#pragma once

#include "hash_table/cpu/rows/admission_filter.h"
#include "hash_table/cpu/rows/change_log.h"
#include "hash_table/cpu/rows/key_index.h"
#include "hash_table/cpu/rows/pinned_rows.h"
#include "hash_table/cpu/rows/row_format.h"
#include "hash_table/cpu/rows/row_store.h"
#include "hash_table/table.h"

namespace fusedrec {

struct alignas(64) Shard {
  mutable std::mutex mutex;                 // guards everything that changes
  std::vector<KeyIndex> keys;               // by segment
  std::vector<AdmissionFilter> candidates;  // by segment; empty where no segment has admission
  std::vector<SegmentStatistics> statistics;
  ChangeLog::Lists changes;
  IdsBySegment unsynced;      // ids that left since Replicas::TakeUnsynced, with repeats
  RowStore::Spare spare;
  KeyIndex::Retired retired;  // lines that were replaced: a reader may still look at them
};

class ShardedRows {
 public:
  // While a Reader lives, replaced lines of keys are kept, and no other id gets a row that left. A reader that found a
  // row can therefore read it.
  //
  // The writer changes the lines and then looks for readers. A reader announces itself and then loads the lines. Both
  // change the same counter (the writer adds 0), so one comes before the other. A writer that sees no reader knows that
  // every later reader sees the current lines.
  class Reader {
   public:
    explicit Reader(const ShardedRows* rows) : rows_(rows) { rows_->readers_.fetch_add(1, std::memory_order_seq_cst); }
    ~Reader() { rows_->readers_.fetch_sub(1, std::memory_order_seq_cst); }
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

   private:
    const ShardedRows* rows_;
  };

  explicit ShardedRows(TableSpec spec);
  absl::Status Open() { return store_.Open(spec_); }

  const TableSpec& spec() const { return spec_; }
  const Limits& limits(int64_t segment) const { return spec_.limits[segment]; }
  bool has_max_rows() const { return has_max_rows_; }
  bool has_admission() const { return has_admission_; }
  int64_t segments() const { return spec_.seeds.size(); }

  absl::Span<Shard> shards() const { return {shards_.get(), kShards}; }
  Shard& ShardWith(uint64_t hash) const { return shards_[ShardOf(hash)]; }
  const RowStore& store() const { return store_; }
  char* Row(uint32_t handle) const { return store_.Row(handle); }
  RowHeader* Header(uint32_t handle) const { return store_.Header(handle); }
  const RowFormat& format(int pool) const { return store_.format(pool); }
  int new_pool() const { return spec_.hot_after > 0 ? 1 : 0; }  // pool of rows that were never trained
  int64_t size(int64_t segment) const;                          // ids that have a row

  // The caller of these methods holds the mutex of the shard.
  absl::Status TakeRow(Shard* shard, int pool, uint32_t* handle);
  void GiveBack(Shard* shard, uint32_t handle);
  absl::Status MakeRow(Shard* shard, int64_t segment, int64_t id, int pool, uint32_t* handle);
  absl::Status MoveRow(Shard* shard, int64_t segment, int64_t id, int to_pool, uint32_t* handle);
  // Removes an id and gives its row back; an id without a row is skipped.
  void RemoveKey(Shard* shard, int64_t segment, int64_t id);
  // Halves the counts of a segment until it counts at most its max_candidates ids. A lookup calls it at its end, so its
  // counts do not depend on the order of its ids. The caller holds no mutex of a shard, nor room_mutex.
  void HalveCandidates();
  void FreeRetired(Shard* shard) const;
  // Calls visit(id, handle, header) for the rows of a segment in these parts; soon after it returns false, no more.
  template <typename Visit>
  void ForEachRow(const Shard& shard, int64_t segment, const Visit& visit, Parts parts = {0, kParts}) const;

  // Writes header, embedding and slots of a row that was never trained. It is rounded alike whenever its id comes.
  void WriteInitial(int64_t segment, int64_t id, int pool, char* row) const;
  // Copies the embedding of such a row. scratch: its memory. An initial row is never in int8.
  void CopyInitial(int64_t segment, int64_t id, Storage to, std::vector<char>* scratch, void* out) const;

  PinnedRows& pins() { return pins_; }
  const PinnedRows& pins() const { return pins_; }
  ChangeLog& change_log() { return change_log_; }
  const ChangeLog& change_log() const { return change_log_; }
  // Whoever makes rows leave or move to make room holds it.
  std::mutex& room_mutex() { return room_mutex_; }

  uint32_t version() const { return version_.load(); }
  uint32_t NextVersion() { return version_.fetch_add(1) + 1; }
  // Number of rows that left or moved. A change ends every look-ahead.
  int64_t moves() const { return moves_.load(); }
  void EndLookAheads() { moves_.fetch_add(1); }
  void SetClock(uint32_t clock, uint32_t version);

 private:
  void InitialNumbers(int64_t segment, int64_t id, float* numbers) const;

  const TableSpec spec_;
  const bool has_max_rows_, has_admission_;
  RowStore store_;
  std::unique_ptr<Shard[]> shards_;
  PinnedRows pins_;
  ChangeLog change_log_;
  std::mutex room_mutex_;
  std::atomic<uint32_t> version_{0};
  std::atomic<int64_t> moves_{0};
  mutable std::atomic<int64_t> readers_{0};
};

// Fetches the headers in groups, because they lie anywhere in memory.
template <typename Visit>
void ShardedRows::ForEachRow(const Shard& shard, int64_t segment, const Visit& visit, Parts parts) const {
  constexpr int kGroup = 32;
  int64_t ids[kGroup];
  uint32_t handles[kGroup];
  int n = 0;
  const auto flush = [&] {
    bool goes_on = true;
    for (int i = 0; i < n; ++i) {
      if constexpr (std::is_void_v<std::invoke_result_t<Visit, int64_t, uint32_t, const RowHeader&>>) {
        visit(ids[i], handles[i], *Header(handles[i]));
      } else {
        goes_on = visit(ids[i], handles[i], *Header(handles[i]));
      }
    }
    n = 0;
    return goes_on;
  };
  const bool all = parts.begin == 0 && parts.end == kParts;
  shard.keys[segment].ForEach([&](int64_t id, uint32_t handle) {
    if (!all && !parts.Hold(PartOf(TableHash(id)))) return true;
    ids[n] = id;
    handles[n] = handle;
    __builtin_prefetch(Row(handle));
    return ++n < kGroup || flush();
  });
  flush();
}

}  // namespace fusedrec
