// The dynamic embedding table of one group of tables (segments): native storage, deferred-hash lookup, fused update.
//
// Sources: MTGRBoost (section 4.1) keeps keys apart from rows, which never move. FusedRec (section 3, "Lossless Lookup")
// makes the key from (segment, id) only at the owner, where ids of all sources are deduplicated.
//
// # Parts
// The classes in parts/ have contracts of their own. HashTable composes them and holds the locks:
//   KeyIndex         id -> handle, one for each shard and segment
//   RowStore         handle -> row, in one or two RowPools, whose rows have a RowFormat
//   AdmissionFilter  counts of ids that have no row yet
//   RunningLookups   the clock, the lookups that run now, their memory
//   ChangeLog        ids that a delta checkpoint copies, and ids that left
//   TrainedIds       ids that a replica reports to the others
//   Accumulator      gradients that wait for their update
//   Optimizer        the update rule, over GradientSum
//
// # Shards
// The high bits of TableHash(id) choose one of 64 shards. They are independent of the bits that chose the owner rank. A
// shard has one KeyIndex per segment and free rows of its own. One thread at a time changes a shard; it takes the mutex
// once per batch, not per id. So many threads work on one batch, and the result does not depend on their order. Reading
// takes no lock at all (key_index.h).
//
// # A training lookup
//   1. A counting sort orders the ids of a message by shard.
//   2. Each shard visits its ids in three overlapping steps: it fetches the line of keys, then the row, then copies. A row
//      that this lookup has seen before has the lookup's clock in its header (`last`). So one probe finds the row,
//      deduplicates it, and feeds LRU and LFU.
//   3. Ids without a row wait until all shards are done, because only then the number of rows to evict is known. Each of
//      them then gets a row with its initial value, a pure function of (table seed, id).
// The result is the handles of the distinct rows, numbered by shard, and the number of each received id's row. An update
// needs no probe.
//
// # Concurrent calls
// Any number of lookups, updates and inference lookups may run at the same time. The caller orders two updates, or an
// update and a lookup, of the same rows, as with any variable. Rows that the last `window` training lookups touched, and
// rows whose gradients wait, are neither evicted nor moved between pools. Their handles hold until then.
#ifndef FUSEDREC_HASH_TABLE_CPU_HASH_TABLE_H_
#define FUSEDREC_HASH_TABLE_CPU_HASH_TABLE_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/parallel.h"
#include "hash_table/cpu/parts/accumulator.h"
#include "hash_table/cpu/parts/admission_filter.h"
#include "hash_table/cpu/parts/change_log.h"
#include "hash_table/cpu/parts/key_index.h"
#include "hash_table/cpu/parts/optimizer.h"
#include "hash_table/cpu/parts/row_format.h"
#include "hash_table/cpu/parts/row_store.h"
#include "hash_table/cpu/parts/running_lookups.h"
#include "hash_table/cpu/parts/trained_ids.h"
#include "hash_table/table_spec.h"

namespace fusedrec {

class HashTable {
 public:
  static constexpr int kShardBits = 6, kShards = 1 << kShardBits;
  static constexpr uint32_t kJustNow = 0xffffffff;  // clock of a lookup whose gradients come at once
  static int ShardOf(uint64_t hash) { return static_cast<int>(hash >> (64 - kShardBits)); }

  static absl::StatusOr<std::unique_ptr<HashTable>> Make(TableSpec spec, Optimizer optimizer);

  const TableSpec& spec() const { return spec_; }
  int64_t segments() const { return spec_.seeds.size(); }
  const RowFormat& format(int pool) const { return rows_.format(pool); }

  // Training form.
  //   rows     [>= V, D]  out: row of each received id, in the order received
  //   inverse  [V]        out: number of the row of each received id
  //   handles             out: handle of each number
  //   clock               out, if wanted: number of this lookup
  //   ahead               in, may be null: the look-ahead that wrote `rows`; only rows that changed since are written
  absl::Status Lookup(const Message& message, const ParallelFor& parallel_for, const RowSink& rows,
                      absl::Span<int32_t> inverse, std::vector<int64_t>* handles, uint32_t* clock = nullptr,
                      const Ahead* ahead = nullptr);

  // Reads the rows that a coming Lookup of this message will need; changes nothing.
  //   rows     [>= V, D]  out: row of each received id that has one
  //   handles  [V]        out: those rows, or kNoRow
  void LookAhead(const Message& message, const ParallelFor& parallel_for, const RowSink& rows,
                 absl::Span<int64_t> handles, int64_t* version, int64_t* moves) const;

  // Inference form: inserts and touches nothing. An id without a row has its initial value.
  void Find(const Message& message, const ParallelFor& parallel_for, const RowSink& rows) const;

  bool IsHandle(int64_t handle) const;
  // Whether rows of the lookup of this clock may have left or moved since. Its handles are then invalid.
  bool IsStale(uint32_t clock) const { return clock + spec_.window <= moved_at_.load(std::memory_order_acquire); }
  // Whether gradients wait for ApplyAccumulated.
  bool HasWaiting() const { return waiting_since_.load(std::memory_order_acquire) != 0; }

  // Asks the disk for the rows of these ids that lie in the file; returns at once.
  void Prefetch(const Message& message) const;

  // Sums gradients of equal rows and applies the optimizer in place.
  //   handles  [W], inverse [V]: of Lookup
  //   grads    [>= V, D], multiplied by `scale`
  //   clock    of that lookup
  //   left_out out, may be null: ascending numbers of rows whose sum is not finite; they and their slots do not change
  void Apply(absl::Span<const int64_t> handles, absl::Span<const int32_t> inverse, const void* grads, Storage storage,
             float scale, const StepInput& step, const ParallelFor& parallel_for, uint32_t clock = kJustNow,
             std::vector<int32_t>* left_out = nullptr);
  // The same in two parts: Accumulate keeps sums by row until ApplyAccumulated. Rows of the lookup of `clock` stay where
  // they are until then. left_out lists rows whose sum is no longer finite; a row is listed once in an update.
  absl::Status Accumulate(absl::Span<const int64_t> handles, absl::Span<const int32_t> inverse, const void* grads,
                          Storage storage, float scale, const ParallelFor& parallel_for, uint32_t clock = 0,
                          std::vector<int32_t>* left_out = nullptr);
  void ApplyAccumulated(const StepInput& step, const ParallelFor& parallel_for);

  // The following methods serve rows that are trained elsewhere, between two lookups, and come back (host_rows.h).
  // Begins an update of rows of the lookup of this clock (0: none has a row). Returns the version that it makes.
  uint32_t BeginUpdate(uint32_t clock);
  bool ChangedSince(int64_t handle, uint32_t version) const {
    return rows_.Header(static_cast<uint32_t>(handle))->updated > version;
  }
  // Writes row, slots and version of each record [keys.size(), record_bytes()] that is newer than the row. The counts of
  // lookups stay. Ids that have left since are skipped.
  void WriteTrained(absl::Span<const SegmentId> keys, const char* records, const ParallelFor& parallel_for);

  // Evicts the `count` rows of a segment that its policy ranks lowest; none without a policy. Returns how many left.
  int64_t Evict(int64_t segment, int64_t count);
  // Removes ids; ids without a row are skipped. Returns how many had a row.
  int64_t Remove(int64_t segment, absl::Span<const int64_t> ids);
  void Clear();
  SegmentStatistics Statistics(int64_t segment) const;
  int64_t size(int64_t segment) const;
  int64_t rows_in_pool(int pool) const { return rows_.size(pool); }
  // Bytes of keys, and of rows (as mapped), for the benchmarks.
  int64_t key_bytes() const;
  int64_t row_bytes(int pool) const { return rows_.bytes(pool); }

  // Checkpoints; see records.cc for the layout of a record.
  int record_bytes() const;
  // Ids of a segment whose rows changed after version `since` (0: all), in no meaningful order, and their handles.
  void Keys(int64_t segment, uint32_t since, const ParallelFor& parallel_for, std::vector<int64_t>* ids,
            std::vector<int64_t>* handles) const;
  // records [handles.size() * record_bytes()]
  void ReadRecords(absl::Span<const int64_t> handles, const ParallelFor& parallel_for, char* records) const;
  // Inserts or overwrites distinct ids.
  absl::Status WriteRecords(int64_t segment, absl::Span<const int64_t> ids, const char* records,
                            const ParallelFor& parallel_for);
  void Candidates(int64_t segment, std::vector<int64_t>* ids, std::vector<int64_t>* counts) const;
  absl::Status SetCandidates(int64_t segment, absl::Span<const int64_t> ids, absl::Span<const int64_t> counts);
  std::vector<int64_t> Tombstones(int64_t segment) const;
  // Forgets the ids that left and the ids whose rows may have changed, and begins to record both anew.
  void ForgetTombstones();

  // Replicas that train apart and are averaged from time to time (replicas.cc); only for tables with `averaged`.
  // Notes that the rows of these ids were trained.
  void NoteTrained(const Message& message);
  // Returns and forgets, since the last call, the trained ids that have a row, by segment, then the ids that left, by
  // segment. counts [2 * segments()]; headers: last << 32 | count of each trained id, 0 of each other id.
  void TakeUnsynced(std::vector<int64_t>* counts, std::vector<int64_t>* ids, std::vector<int64_t>* headers);
  // numbers [ids.size() * format(0).numbers()]: row and slots of ids grouped by segment; initial numbers without a row.
  void ReadNumbers(absl::Span<const int64_t> ids, absl::Span<const int64_t> segment_splits,
                   const ParallelFor& parallel_for, float* numbers) const;
  // Removes the ids `left`, except rows in use, then sets rows of distinct ids; both are grouped by segment. Existing rows
  // stay where they are. `step` seeds the rounding, so replicas with equal arguments become equal.
  absl::Status Merge(absl::Span<const int64_t> left, absl::Span<const int64_t> left_splits,
                     absl::Span<const int64_t> ids, absl::Span<const int64_t> segment_splits, const float* numbers,
                     absl::Span<const int64_t> headers, uint32_t step);

  uint32_t clock() const { return lookups_.clock(); }
  uint32_t version() const { return version_.load(); }
  void SetClock(uint32_t clock, uint32_t version);

 private:
  struct alignas(64) Shard {
    mutable std::mutex mutex;                 // of everything that changes
    std::vector<KeyIndex> keys;               // by segment
    std::vector<AdmissionFilter> candidates;  // by segment; empty without admission
    std::vector<SegmentStatistics> statistics;
    ChangeLog::Lists changes;
    IdsBySegment unsynced;      // ids that left since TakeUnsynced, with repeats
    RowStore::Spare spare;
    KeyIndex::Retired retired;  // lines that were replaced: a reader may still look at them
  };
  struct Visit;  // one lookup's work on one shard (lookup.cc)
  // (segment, id), sorted, of the rows that a lookup is about to move. It has not touched them yet, but they must stay.
  using Waiting = std::vector<std::pair<int64_t, int64_t>>;
  class Reader;  // keeps replaced lines of keys, and rows that left, as they are (reader.h)

  HashTable(TableSpec spec, Optimizer optimizer);
  void SortByShard(const Message& message, const ParallelFor& parallel_for, LookupScratch* scratch,
                   std::vector<int64_t>* shard_begin) const;
  void VisitKnown(Visit* visit);
  absl::Status VisitNew(Visit* visit);
  void Admit(Visit* visit);
  absl::Status MakeRoomFor(const std::vector<Visit>& visits);
  // Makes room for new ids, counted by segment, and for the rows that are about to move into memory.
  absl::Status MakeRoom(const std::vector<int64_t>& fresh, const Waiting& waiting);
  bool Touch(Visit* visit, const ReceivedId& item, int64_t place, uint32_t handle, char* row, bool write = true);
  void Read(const Message& message, const ParallelFor& parallel_for, const RowSink& rows,
            absl::Span<int64_t> handles) const;
  // Tells which rows may be in use: rows that a running lookup or one of the last `window` has touched, and rows whose
  // gradients wait.
  struct Pins {
    uint32_t now, waiting_since;
    int64_t window;
    std::vector<uint32_t> running;

    bool Hold(const RowHeader& header) const {
      return header.last + window > now || (waiting_since != 0 && header.last >= waiting_since) ||
             std::find(running.begin(), running.end(), header.last) != running.end();
    }
  };
  Pins CurrentPins() const;
  // Notes that rows leave or move which no pin of this clock holds.
  void NoteMove(int64_t clock) {
    int64_t seen = moved_at_.load();
    while (seen < clock && !moved_at_.compare_exchange_weak(seen, clock)) {
    }
  }
  // Takes a row of `pool` for a shard whose mutex is held.
  absl::Status TakeRow(Shard* shard, int pool, uint32_t* handle);
  void GiveBack(Shard* shard, uint32_t handle);
  absl::Status MakeRow(Shard* shard, int64_t segment, int64_t id, int pool, uint32_t* handle);
  absl::Status MoveRow(Shard* shard, int64_t segment, int64_t id, int to_pool, uint32_t* handle);
  int new_pool() const { return spec_.hot_after > 0 ? 1 : 0; }  // pool of rows that were never trained
  void InitialNumbers(int64_t segment, int64_t id, float* numbers) const;
  void WriteInitial(int64_t segment, int64_t id, int pool, char* row) const;
  template <typename Body>
  void ForEachRow(const Shard& shard, int64_t segment, const Body& visit) const;
  int64_t EvictWorst(int64_t segment, int64_t count, const Waiting& waiting);
  int64_t EvictWorstOnce(int64_t segment, int64_t count, const Waiting& waiting);  // -1 when no row may leave
  void EvictExpired();
  absl::StatusOr<int64_t> DemoteColdest(int64_t count);
  absl::StatusOr<int64_t> DemoteColdestOnce(int64_t count);  // -1 when no row may move
  void RemoveKey(Shard* shard, int64_t segment, int64_t id);
  void FreeRetired(Shard* shard) const;  // frees rows and lines that no reader can see
  void WriteRecordNumbers(const char* record, uint32_t handle);
  absl::Status WriteRecord(Shard* shard, int64_t segment, int64_t id, const char* record);
  absl::Status WriteNumbers(Shard* shard, int64_t segment, int64_t id, const float* numbers, int64_t header,
                            uint32_t step);
  void UpdateRow(const Prepared& prepared, uint32_t handle, float* grad, uint32_t version, float* scratch);

  const TableSpec spec_;
  int64_t memory_rows_ = 0;  // rows that the memory budget holds; 0: no limit
  const Optimizer optimizer_;
  RowStore rows_;
  std::unique_ptr<Shard[]> shards_;
  RunningLookups lookups_;
  std::atomic<uint32_t> version_{0};        // number of changes of rows
  std::atomic<int64_t> moves_{0};           // number of rows that left or moved; a change ends every look-ahead
  std::atomic<int64_t> moved_at_{-1};       // clock of the last lookup that made rows leave or move
  std::atomic<uint32_t> waiting_since_{0};  // clock of the first lookup whose gradients wait; 0: none do
  ChangeLog change_log_;
  mutable std::atomic<int64_t> readers_{0};
  std::mutex room_mutex_;  // one lookup at a time makes room
  std::mutex accumulator_mutex_;
  Accumulator accumulator_;
  TrainedIds trained_;
};

// Calls visit(id, handle, header) for the rows of a segment in one shard, whose mutex is held. It fetches the headers in
// groups, because they lie anywhere in memory.
template <typename Body>
void HashTable::ForEachRow(const Shard& shard, int64_t segment, const Body& visit) const {
  constexpr int kGroup = 32;
  int64_t ids[kGroup];
  uint32_t handles[kGroup];
  int n = 0;
  const auto flush = [&] {
    for (int i = 0; i < n; ++i) visit(ids[i], handles[i], *rows_.Header(handles[i]));
    n = 0;
  };
  shard.keys[segment].ForEach([&](int64_t id, uint32_t handle) {
    ids[n] = id;
    handles[n] = handle;
    __builtin_prefetch(rows_.Row(handle));
    if (++n == kGroup) flush();
  });
  flush();
}

}  // namespace fusedrec

#endif  // FUSEDREC_HASH_TABLE_CPU_HASH_TABLE_H_
