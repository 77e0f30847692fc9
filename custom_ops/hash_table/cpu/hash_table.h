// The dynamic embedding table of one group of tables (segments): native storage, deferred-hash lookup, fused update.
//
// Sources: MTGRBoost (section 4.1) for keys apart from rows that never move, FusedRec (section 3, "Lossless Lookup") for
// making the key from (segment, id) only at the owner, where ids of all sources are deduplicated.
//
// # Shards
// 64 shards by the high bits of TableHash(id), which are independent of those that chose the owner rank. A shard has one
// KeyIndex per segment and free rows of its own; one thread at a time changes it (its mutex is taken once per batch, not
// per id), so a batch is worked on by as many threads as there are shards, in an order that does not depend on them.
// Reading takes no lock at all (key_index.h).
//
// # A training lookup
//   1. The ids of a message are sorted by shard (counting sort).
//   2. Every shard goes through its ids three steps at a time, each with the memory that it needs already under way:
//      line of keys; row; the copy. A row that this lookup has seen before is known by its header (`last` is this
//      lookup's clock), so the probe that finds the row is also the one that deduplicates it and that feeds LRU and LFU.
//   3. Ids without a row wait until all shards are through: only then is it known how many rows must leave to make room.
//      They then get a row with its initial value, a pure function of (table seed, id).
// Answers are row handles, numbered by shard, and for every received id the number of its row; an update needs no probe.
//
// # What may run at the same time
// Lookups, updates and inference lookups of any number. Two updates, or an update and a lookup, of the same rows are the
// caller's to order, as with any variable. Rows that the last `window` training lookups touched, and rows whose gradients
// wait, are neither evicted nor moved between pools, so their handles hold until then.
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
#include "hash_table/cpu/accumulator.h"
#include "hash_table/cpu/key_index.h"
#include "hash_table/cpu/optimizer.h"
#include "hash_table/cpu/row_format.h"
#include "hash_table/cpu/row_pool.h"
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
  const RowFormat& format(int pool) const { return pools_[pool]->format(); }

  // Training form.
  //   rows     [>= V, D]  out: row of each received id, in the order received
  //   inverse  [V]        out: number of the row of each received id
  //   handles             out: handle of each number
  //   clock               out, if wanted: number of this lookup
  //   ahead               in, if there was one: `rows` holds what it wrote, and only what changed since is written
  absl::Status Lookup(const Message& message, const ParallelFor& parallel_for, const RowSink& rows,
                      absl::Span<int32_t> inverse, std::vector<int64_t>* handles, uint32_t* clock = nullptr,
                      const Ahead* ahead = nullptr);

  // Reads the rows that a coming Lookup of this message will want; changes nothing.
  //   rows     [>= V, D]  out: row of each received id that has one
  //   handles  [V]        out: those rows, or kNoRow
  void LookAhead(const Message& message, const ParallelFor& parallel_for, const RowSink& rows,
                 absl::Span<int64_t> handles, int64_t* version, int64_t* moves) const;

  // Inference form: inserts and touches nothing; an id without a row has its initial value.
  void Find(const Message& message, const ParallelFor& parallel_for, const RowSink& rows) const;

  bool IsHandle(int64_t handle) const;
  // Whether rows of the lookup of this clock may have left or moved since: its handles are no good then.
  bool IsStale(uint32_t clock) const { return clock + spec_.window <= moved_at_.load(std::memory_order_acquire); }
  // Whether gradients wait for ApplyAccumulated.
  bool HasWaiting() const { return waiting_since_.load(std::memory_order_acquire) != 0; }

  // Asks the disk for the rows of these ids that are in the file; returns at once.
  void Prefetch(const Message& message) const;

  // Sums gradients of equal rows and applies the optimizer in place.
  //   handles  [W], inverse [V]: of Lookup
  //   grads    [>= V, D], multiplied by `scale`
  //   clock    of that lookup
  //   left_out out, if wanted: ascending numbers of rows whose sum is not finite; they and their slots stay as they are
  void Apply(absl::Span<const int64_t> handles, absl::Span<const int32_t> inverse, const void* grads, Storage storage,
             float scale, const StepInput& step, const ParallelFor& parallel_for, uint32_t clock = kJustNow,
             std::vector<int32_t>* left_out = nullptr);
  // The same in two parts: sums are kept, by row, until ApplyAccumulated. `clock` is that of the lookup: its rows stay
  // where they are until then. left_out: numbers of rows whose sum is no longer finite; each comes once in an update.
  absl::Status Accumulate(absl::Span<const int64_t> handles, absl::Span<const int32_t> inverse, const void* grads,
                          Storage storage, float scale, const ParallelFor& parallel_for, uint32_t clock = 0,
                          std::vector<int32_t>* left_out = nullptr);
  void ApplyAccumulated(const StepInput& step, const ParallelFor& parallel_for);

  // Rows that are trained somewhere else, between a Lookup and the next, and come back (host_rows.h).
  // An update of rows of the lookup of this clock begins (0: none has a row): the version that it makes.
  uint32_t BeginUpdate(uint32_t clock);
  bool ChangedSince(int64_t handle, uint32_t version) const {
    return RowFormat::Header(RowOf(static_cast<uint32_t>(handle)))->updated > version;
  }
  // Row, slots and version of each record [keys.size(), record_bytes()] that is newer than the row; what lookups count
  // stays. Ids that have left since are passed over.
  void WriteTrained(absl::Span<const SegmentId> keys, const char* records, const ParallelFor& parallel_for);

  // Evicts the `count` rows of a segment that its policy ranks lowest (none without one); returns how many could go.
  int64_t Evict(int64_t segment, int64_t count);
  // Removes ids; those that are not there are passed over. Returns how many were there.
  int64_t Remove(int64_t segment, absl::Span<const int64_t> ids);
  void Clear();
  SegmentStatistics Statistics(int64_t segment) const;
  int64_t size(int64_t segment) const;
  int64_t rows_in_pool(int pool) const { return pool_rows_[pool].load(std::memory_order_relaxed); }
  // Bytes of keys, and of rows (as mapped), for the benchmarks.
  int64_t key_bytes() const;
  int64_t row_bytes(int pool) const;

  // Checkpoints; see records.cc for the layout of a record.
  int record_bytes() const;
  // Ids of a segment whose rows changed after version `since` (0: all), in no order that means anything, and their
  // handles.
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
  // Begins anew what deltas are made of: the record of ids that left, and that of ids whose rows may have changed.
  void ForgetTombstones();

  // Replicas that train apart and are averaged from time to time (replicas.cc); for tables whose spec says so.
  // Notes that the rows of these ids have been trained.
  void NoteTrained(const Message& message);
  // What has happened since it was asked last: ids by segment that were trained and have a row, then ids by segment that
  // left and have none. counts [2 * segments()]; headers: last << 32 | count of each trained id, 0 of the others.
  void TakeUnsynced(std::vector<int64_t>* counts, std::vector<int64_t>* ids, std::vector<int64_t>* headers);
  // numbers [ids.size() * format(0).numbers()]: row and slots of ids grouped by segment; initial ones without a row.
  void ReadNumbers(absl::Span<const int64_t> ids, absl::Span<const int64_t> segment_splits,
                   const ParallelFor& parallel_for, float* numbers) const;
  // Removes the ids `left`, but for rows in use, then sets rows of distinct ids; both are grouped by segment. Rows that
  // are there stay where they are. `step` seeds the rounding: replicas that are told the same become the same.
  absl::Status Merge(absl::Span<const int64_t> left, absl::Span<const int64_t> left_splits,
                     absl::Span<const int64_t> ids, absl::Span<const int64_t> segment_splits, const float* numbers,
                     absl::Span<const int64_t> headers, uint32_t step);

  uint32_t clock() const { return clock_.load(); }
  uint32_t version() const { return version_.load(); }
  void SetClock(uint32_t clock, uint32_t version);

 private:
  struct Item {  // one received id
    int64_t id;
    uint32_t position;  // in the message, headers not counted
    uint32_t segment;
  };
  struct alignas(64) Shard {
    mutable std::mutex mutex;              // of everything that changes
    std::vector<KeyIndex> keys;            // by segment
    std::vector<KeyIndex> candidates;      // by segment: ids that were seen, how often; with admission only
    std::vector<SegmentStatistics> statistics;
    std::vector<std::vector<int64_t>> tombstones;  // by segment, with repeats
    std::vector<std::vector<int64_t>> unsynced;    // by segment: ids that left since TakeUnsynced, with repeats
    std::vector<std::vector<int64_t>> touched;     // by segment: ids of rows that may have changed (changes.cc), the same
    std::vector<uint32_t> free_rows[2];    // by pool
    std::vector<uint32_t> left;            // handles of rows that were given back: a reader may still look at them
    KeyIndex::Retired retired;             // lines that were replaced: the same
  };
  // Memory of one lookup, kept for the next one: what is new for every batch would be cleared by the system every time.
  struct Scratch {
    std::vector<Item> items;      // of all ids, by shard; as long as the longest batch so far
    std::vector<int32_t> place;   // of the i-th received id among the items
    std::vector<int32_t> number;  // of each item's row

    void MakeRoomFor(size_t n) {
      if (n <= items.size()) return;
      items.resize(n);
      place.resize(n);
      number.resize(n);
    }
  };
  struct Visit;  // one lookup's work on one shard (lookup.cc)
  // (segment, id) of rows of a lookup that are about to move, in order: not touched yet, but they may not leave.
  using Waiting = std::vector<std::pair<int64_t, int64_t>>;
  class Running;  // a lookup, while it runs (lookup.cc)
  class Reader;  // while one lives, lines of keys that were replaced and rows that left stay as they are

  HashTable(TableSpec spec, Optimizer optimizer);
  static constexpr uint32_t kPoolBit = uint32_t{1} << 31;
  static int PoolOf(uint32_t handle) { return handle >> 31; }
  char* RowOf(uint32_t handle) const { return pools_[PoolOf(handle)]->Row(handle & ~kPoolBit); }
  // Asks for header and embedding.
  void FetchRow(uint32_t handle) const {
    const char* row = RowOf(handle);
    for (int offset = 0; offset < fetch_bytes_[PoolOf(handle)]; offset += 64) __builtin_prefetch(row + offset);
  }

  void SortByShard(const Message& message, const ParallelFor& parallel_for, Scratch* scratch,
                   std::vector<int64_t>* shard_begin) const;
  void VisitKnown(Visit* visit);
  absl::Status VisitNew(Visit* visit);
  void Admit(Visit* visit);
  absl::Status MakeRoomFor(const std::vector<Visit>& visits);
  // Room for new ids, by segment, and for the rows that are about to move into memory.
  absl::Status MakeRoom(const std::vector<int64_t>& fresh, const Waiting& waiting);
  bool Touch(Visit* visit, const Item& item, int64_t place, uint32_t handle, char* row, bool write = true);
  void Read(const Message& message, const ParallelFor& parallel_for, const RowSink& rows,
            absl::Span<int64_t> handles) const;
  // Rows whose handles may still be in use: a lookup that runs now has touched them, or one of the last `window` has, or
  // their gradients wait.
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
  // Rows are leaving, or moving, that a lookup of `clock` may move.
  void NoteMove(int64_t clock) {
    int64_t seen = moved_at_.load();
    while (seen < clock && !moved_at_.compare_exchange_weak(seen, clock)) {
    }
  }
  void RecordTouch(Shard* shard, int64_t segment, int64_t id, uint32_t last);
  // A row of `pool` for a shard whose mutex is held.
  absl::Status TakeRow(Shard* shard, int pool, uint32_t* handle);
  void GiveBack(Shard* shard, uint32_t handle);
  absl::Status MakeRow(Shard* shard, int64_t segment, int64_t id, int pool, uint32_t* handle);
  absl::Status MoveRow(Shard* shard, int64_t segment, int64_t id, int to_pool, uint32_t* handle);
  int new_pool() const { return spec_.hot_after > 0 ? 1 : 0; }  // of rows that were never trained
  void InitialNumbers(int64_t segment, int64_t id, float* numbers) const;
  void WriteInitial(int64_t segment, int64_t id, int pool, char* row) const;
  template <typename Body>
  void ForEachRow(const Shard& shard, int64_t segment, const Body& visit) const;
  int64_t CountCandidate(Shard* shard, int64_t segment, int64_t id);
  int64_t EvictWorst(int64_t segment, int64_t count, const Waiting& waiting);
  int64_t EvictWorstOnce(int64_t segment, int64_t count, const Waiting& waiting);  // -1 where no row may leave
  void EvictExpired();
  absl::StatusOr<int64_t> DemoteColdest(int64_t count);
  absl::StatusOr<int64_t> DemoteColdestOnce(int64_t count);  // the same
  void RemoveKey(Shard* shard, int64_t segment, int64_t id);
  void FreeRetired(Shard* shard) const;  // what nobody can see any more
  void WriteRecordNumbers(const char* record, uint32_t handle);
  absl::Status WriteRecord(Shard* shard, int64_t segment, int64_t id, const char* record);
  absl::Status WriteNumbers(Shard* shard, int64_t segment, int64_t id, const float* numbers, int64_t header,
                            uint32_t step);
  void FetchForUpdate(uint32_t handle) const;
  void UpdateRow(const Prepared& prepared, uint32_t handle, float* grad, uint32_t version, float* scratch);

  const TableSpec spec_;
  int fetch_bytes_[2] = {0, 0};  // by pool
  int64_t memory_rows_ = 0;  // of the budget; 0: no limit
  const Optimizer optimizer_;
  std::unique_ptr<RowPool> pools_[2];  // 0: memory; 1: 16-bit rows or rows in a file, null without
  std::unique_ptr<Shard[]> shards_;
  std::atomic<int64_t> pool_rows_[2] = {{0}, {0}};
  std::atomic<uint32_t> clock_{0};    // training lookups
  std::atomic<uint32_t> version_{0};  // changes of rows
  std::atomic<int64_t> moves_{0};             // rows that left or moved, and all else that a look-ahead cannot outlive
  std::atomic<int64_t> moved_at_{-1};         // clock of the last lookup that made rows leave or move
  std::atomic<uint32_t> waiting_since_{0};    // clock of the first lookup whose gradients wait; 0: none do
  std::atomic<int64_t> record_clock_{-1};     // clock at which the record of touched rows begins; -1: there is none
  std::atomic<uint32_t> record_version_{0};   // version then
  mutable std::atomic<int64_t> readers_{0};
  mutable std::mutex running_mutex_;
  std::vector<uint32_t> running_;  // clocks of the lookups that run now
  std::vector<std::unique_ptr<Scratch>> idle_;  // of lookups that have ended
  std::mutex room_mutex_;  // one lookup at a time makes room
  std::mutex accumulator_mutex_;
  Accumulator accumulator_;
  std::mutex trained_mutex_;
  std::vector<std::vector<int64_t>> trained_;  // by segment: ids of NoteTrained, with repeats
  std::vector<size_t> distinct_trained_;       // of them, when repeats were taken out last
};

// Calls visit(id, handle, header) for the rows of a segment in one shard, whose mutex is held. Headers lie anywhere in
// memory: they are fetched in groups.
template <typename Body>
void HashTable::ForEachRow(const Shard& shard, int64_t segment, const Body& visit) const {
  constexpr int kGroup = 32;
  int64_t ids[kGroup];
  uint32_t handles[kGroup];
  int n = 0;
  const auto flush = [&] {
    for (int i = 0; i < n; ++i) visit(ids[i], handles[i], *RowFormat::Header(RowOf(handles[i])));
    n = 0;
  };
  shard.keys[segment].ForEach([&](int64_t id, uint32_t handle) {
    ids[n] = id;
    handles[n] = handle;
    __builtin_prefetch(RowOf(handle));
    if (++n == kGroup) flush();
  });
  flush();
}

}  // namespace fusedrec

#endif  // FUSEDREC_HASH_TABLE_CPU_HASH_TABLE_H_
