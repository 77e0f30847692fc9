// The dynamic embedding table of one group of tables (segments): native storage, deferred-hash lookup, fused update.
//
// Sources: MTGRBoost (section 4.1) keeps keys apart from rows, which never move. FusedRec (section 3, "Lossless Lookup")
// makes the key from (segment, id) only at the owner, where ids of all sources are deduplicated.
//
// # Parts
// HashTable composes the classes of rows/ and parts/, which have contracts of their own:
//   ShardedRows   ids and their rows, in 64 shards: KeyIndex (id -> handle), RowStore (handle -> row, whose bytes RowFormat
//                 lays out), AdmissionFilter (counts of ids without a row), ChangeLog (ids that a delta checkpoint copies)
//   PinnedRows    the rows that may be in use; RunningLookups, the clock
//   Evictor       makes room at max_rows
//   FileTier      makes room at memory_budget: rows in a file
//   Demoter       moves rows that are no longer hot back to 16 bits
//   RowRecords    rows as checkpoints hold them
//   Replicas      replicas that are averaged, and the ids that they exchange
//   Accumulator   gradients that wait for their update
//   RuleStep      the update rule, over GradientSum
//
// # A training lookup
//   1. A counting sort orders the ids of a message by shard.
//   2. Each shard visits its ids in three overlapping steps: it fetches the line of keys, then the row, then copies. A row
//      that this lookup has seen before has the lookup's clock in its header (`last`). So one probe finds the row,
//      deduplicates it, and feeds LRU and LFU.
//   3. Ids without a row wait until all shards are done, because only then the number of rows to evict is known. Each of
//      them then gets a row with its initial value, a pure function of (table seed, id).
//   4. At its end it demotes rows of a mixed table that have cooled, so that whatever reads ahead of the next lookup sees
//      the rows of that lookup.
// The result is the handles of the distinct rows, numbered by shard, and the number of each received id's row. An update
// needs no probe.
//
// # Concurrent calls
// Any number of lookups, updates and inference lookups may run at the same time. The caller orders two updates, or an
// update and a lookup, of the same rows, as with any variable. Rows that the last `window` training lookups touched, and
// rows whose gradients wait, are neither evicted nor moved between pools. Their handles hold until then.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/hash.h"
#include "common/parallel.h"
#include "hash_table/cpu/parts/gradient_sum.h"
#include "hash_table/cpu/parts/eviction.h"
#include "hash_table/cpu/parts/message_runs.h"
#include "hash_table/cpu/parts/replicas.h"
#include "hash_table/cpu/parts/row_records.h"
#include "hash_table/cpu/rows/sharded_rows.h"
#include "hash_table/cpu/rule_step.h"
#include "hash_table/table_spec.h"

namespace fusedrec {

class HashTable {
 public:
  static constexpr uint32_t kJustNow = 0xffffffff;  // clock of a lookup whose gradients come at once

  static absl::StatusOr<std::unique_ptr<HashTable>> Make(TableSpec spec);

  const TableSpec& spec() const { return rows_.spec(); }
  int64_t segments() const { return rows_.segments(); }
  const RowFormat& format(int pool) const { return rows_.format(pool); }
  uint32_t clock() const { return rows_.pins().clock(); }
  uint32_t version() const { return rows_.version(); }
  void SetClock(uint32_t clock, uint32_t version) { rows_.SetClock(clock, version); }

  // Training form.
  //   rows     [>= V, D]  out: row of each received id, in the order received
  //   inverse  [V]        out: number of the row of each received id
  //   handles             out: handle of each number
  //   clock               out, if wanted: number of this lookup
  //   ahead               in, may be null: the look-ahead that wrote `rows`; only rows that changed since are written
  //   window              lookups, with this one, whose gradients are to come; see PinnedRows
  absl::Status Lookup(const Message& message, const ParallelFor& parallel_for, const RowSink& rows,
                      absl::Span<int32_t> inverse, std::vector<int64_t>* handles, uint32_t* clock = nullptr,
                      const Ahead* ahead = nullptr, int64_t window = 1);

  // Reads the rows that a coming Lookup of this message will need; changes nothing.
  //   rows     [>= V, D]  out: row of each received id that has one
  //   handles  [V]        out: those rows, or kNoRow
  void LookAhead(const Message& message, const ParallelFor& parallel_for, const RowSink& rows,
                 absl::Span<int64_t> handles, int64_t* version, int64_t* moves) const;

  // Tells look-aheads of other messages and of other tables apart.
  uint64_t FingerprintOf(const Message& message, const ParallelFor& parallel_for) const {
    return number_ + fusedrec::FingerprintOf(message, segments(), parallel_for);
  }

  // Inference form: inserts and touches nothing. An id without a row has its initial value.
  void Find(const Message& message, const ParallelFor& parallel_for, const RowSink& rows) const;

  // Rows as the next Lookup of this message would answer them; changes nothing. Arguments as for Lookup.
  void Peek(const Message& message, const ParallelFor& parallel_for, const RowSink& rows, const Ahead* ahead,
            int64_t window) const;

  // See FileTier.
  void Prefetch(const Message& message) const { tier_.Prefetch(message); }

  bool IsHandle(int64_t handle) const;
  // Returns whether rows of the lookup of this clock may have left or moved since. Its handles are then invalid.
  bool IsStale(uint32_t clock) const { return rows_.pins().IsStale(clock); }
  // Returns whether handles with this sum of hashes are all handles of the lookup of this clock, each once. It is known for
  // the latest lookups.
  bool AreHandlesOf(uint32_t clock, uint64_t sum) const { return rows_.pins().lookups().HandlesOf(clock) == sum; }
  // Returns whether gradients wait for ApplyAccumulated.
  bool HasWaiting() const { return rows_.pins().waiting_since() != 0; }

  // Sums gradients of equal rows and applies the optimizer in place.
  //   handles  [W], inverse [V]: of Lookup
  //   grads    [>= V, D], multiplied by `scale`
  //   clock    of that lookup
  //   left_out out, may be null: ascending numbers of rows whose sum is not finite; they and their slots do not change
  void Apply(absl::Span<const int64_t> handles, absl::Span<const int32_t> inverse, const void* grads, Storage storage,
             float scale, const Step& step, const ParallelFor& parallel_for, uint32_t clock = kJustNow,
             std::vector<int32_t>* left_out = nullptr);
  // The same in two parts: Accumulate keeps sums by row until ApplyAccumulated. Rows of the lookup of `clock` stay where
  // they are until then. left_out lists rows whose sum is no longer finite; a row is listed once in an update. `begin`
  // drops earlier sums: a training step that failed may have left some.
  absl::Status Accumulate(absl::Span<const int64_t> handles, absl::Span<const int32_t> inverse, const void* grads,
                          Storage storage, float scale, const ParallelFor& parallel_for, uint32_t clock = 0,
                          std::vector<int32_t>* left_out = nullptr, bool begin = false);
  void ApplyAccumulated(const Step& step, const ParallelFor& parallel_for);

  // For rows that are trained elsewhere, between two lookups, and come back (host_rows.cc, RowRecords::WriteTrained).
  // Begins an update of rows of the lookup of this clock (0: none has a row). Returns the version that it makes.
  uint32_t BeginUpdate(uint32_t clock);
  const RowHeader& HeaderOf(int64_t handle) const { return *rows_.Header(static_cast<uint32_t>(handle)); }
  // kNoRow: the id has none.
  int64_t HandleOf(const SegmentId& key) const {
    const uint64_t hash = TableHash(key.id);
    const uint32_t handle = rows_.ShardWith(hash).keys[key.segment].Find(key.id, hash);
    return handle == kAbsent ? kNoRow : int64_t{handle};
  }

  // Evicts the `count` rows of a segment that its policy ranks lowest; none without a policy. Returns how many left.
  int64_t Evict(int64_t segment, int64_t count);
  // Removes ids; ids without a row are skipped. Returns how many had a row.
  int64_t Remove(int64_t segment, absl::Span<const int64_t> ids);
  void Clear();

  SegmentStatistics Statistics(int64_t segment) const;
  int64_t size(int64_t segment) const { return rows_.size(segment); }
  int64_t rows_in_pool(int pool) const { return rows_.store().size(pool); }
  // Bytes of keys, and of rows (as mapped), for the benchmarks.
  int64_t key_bytes() const;
  int64_t row_bytes(int pool) const { return rows_.store().bytes(pool); }

  // Checkpoints.
  RowRecords& records() { return records_; }
  const RowRecords& records() const { return records_; }
  // Ids of a segment whose rows changed after `since` (its beginning: all), in no meaningful order, and their handles.
  void Keys(int64_t segment, Moment since, const ParallelFor& parallel_for, std::vector<int64_t>* ids,
            std::vector<int64_t>* handles) const;
  void Candidates(int64_t segment, std::vector<int64_t>* ids, std::vector<int64_t>* counts) const;
  absl::Status SetCandidates(int64_t segment, absl::Span<const int64_t> ids, absl::Span<const int64_t> counts);
  std::vector<int64_t> Tombstones(int64_t segment) const;
  // Forgets the ids that left and the ids whose rows may have changed, and begins to record both anew.
  void ForgetTombstones();

  Replicas& replicas() { return replicas_; }

 private:
  class TrainingLookup;  // one call of Lookup (lookup.cc)

  explicit HashTable(TableSpec spec);
  struct Reading;  // what a read does with an id (look_ahead.cc)
  void Read(const Message& message, const ParallelFor& parallel_for, const RowSink& rows, const Reading& reading) const;
  void UpdateRow(const RuleStep& step, uint32_t handle, float* grad, uint32_t version, float* scratch);

  const uint64_t number_;  // a hash of the number of tables that this process made before
  ShardedRows rows_;
  FileTier tier_;
  Evictor evictor_;
  Demoter demoter_;
  RowRecords records_;
  Replicas replicas_;
  std::mutex accumulator_mutex_;
  Accumulator accumulator_;
};

}  // namespace fusedrec
