// The dynamic embedding table of one group of tables (segments): native storage, deferred-hash lookup, fused update.
//
// Sources: MTGRBoost (section 4.1) keeps keys apart from rows, which never move. FusedRec (section 3, "Lossless Lookup")
// makes the key from (segment, id) only at the owner, where ids of all sources are deduplicated.
//
// It composes the classes of rows/ (ids and their rows, in 64 shards) and of parts/, which have contracts of their own.
//
// # A training lookup
//   1. A counting sort orders the ids of a message by shard.
//   2. Each shard visits its ids in three overlapping steps: it fetches the line of keys, then the row, then copies. A row
//      that this lookup has seen before has the lookup's clock in its header (`last`). So one probe finds the row,
//      deduplicates it, and feeds LRU and LFU.
//   3. An id without a row gets one with its initial value, a pure function of (table seed, id). Where rows may have to
//      leave, it waits until all shards are done, because only then the number of rows to evict is known.
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

#include "common/hash.h"
#include "hash_table/cpu/parts/eviction.h"
#include "hash_table/cpu/parts/gradient_sum.h"
#include "hash_table/cpu/parts/message_runs.h"
#include "hash_table/cpu/parts/replicas.h"
#include "hash_table/cpu/parts/row_records.h"
#include "hash_table/cpu/rows/sharded_rows.h"
#include "hash_table/cpu/rule_step.h"
#include "hash_table/table.h"

namespace fusedrec {

class HashTable : public Table {
 public:
  explicit HashTable(TableSpec spec);
  // Maps its first rows; comes before every other call.
  absl::Status Open() { return rows_.Open(); }

  const TableSpec& spec() const override { return rows_.spec(); }
  const RowFormat& format(int pool) const { return rows_.format(pool); }
  uint32_t clock() const { return rows_.pins().clock(); }
  uint32_t version() const { return rows_.version(); }

  // Handles have the clock of the lookup above the number of the row.
  absl::Status Lookup(const TableCall& call, const Message& message, int64_t window, const Ahead* ahead,
                      const RowsOut& rows, int32_t* inverse, int64_t* handles, int64_t* num_rows) override;
  bool FloatsOf(absl::Span<const int64_t> handles, std::vector<const float*>* rows) const override;
  // rows: only those of ids with a row are written. Changes nothing.
  absl::Status LookAhead(const TableCall& call, const Message& message, const RowsOut& rows, absl::Span<int64_t> handles,
                         Ahead* mark) override;
  absl::Status Read(const TableCall& call, const Message& message, int64_t window, const Ahead* ahead,
                    const RowsOut& rows) override;
  absl::Status Prefetch(const TableCall&, const Message& message) override {
    tier_.Prefetch(message);
    return absl::OkStatus();
  }
  // Trains the rows of which no gradients are to come, and lets sums of the others wait.
  absl::Status Apply(const TableCall& call, const Gradients& in, const Step& step, std::vector<int32_t>* left_out) override;
  // Rows of the lookup stay where they are until the update. left_out lists rows whose sum is no longer finite; a row is
  // listed once in an update. `begin` drops earlier sums: a training step that failed may have left some.
  absl::Status Accumulate(const TableCall& call, const Gradients& in, bool begin, std::vector<int32_t>* left_out) override;
  absl::Status ApplyAccumulated(const TableCall& call, const Step& step) override;

  absl::Status Statistics(TableStatistics* statistics) override;
  SegmentStatistics StatisticsOf(int64_t segment) const;
  int64_t size(int64_t segment) const { return rows_.size(segment); }
  int64_t rows_in_pool(int pool) const { return rows_.store().size(pool); }
  int64_t key_bytes() const;
  int64_t row_bytes(int pool) const { return rows_.store().bytes(pool); }  // as mapped

  absl::Status Keys(const TableCall& call, int64_t segment, Moment since, std::vector<int64_t>* ids,
                    std::vector<int64_t>* handles) override;
  int64_t record_bytes() const override { return records_.bytes(); }
  absl::Status ReadRecords(const TableCall& call, absl::Span<const int64_t> handles, char* records) override;
  absl::Status Import(const TableCall& call, int64_t segment, absl::Span<const int64_t> ids, const char* records) override {
    return records_.Write(segment, ids, records, call.parallel_for);
  }
  absl::Status Remove(const TableCall& call, int64_t segment, absl::Span<const int64_t> ids, int64_t* removed) override;
  absl::Status Evict(const TableCall& call, int64_t segment, int64_t count, int64_t* evicted) override;
  absl::Status Clear(const TableCall& call) override;
  absl::Status Tombstones(const TableCall& call, int64_t segment, std::vector<int64_t>* ids) override;
  void ForgetTombstones() override;
  absl::Status Candidates(const TableCall& call, int64_t segment, std::vector<int64_t>* ids,
                          std::vector<int64_t>* counts) override;
  absl::Status SetCandidates(const TableCall& call, int64_t segment, absl::Span<const int64_t> ids,
                             absl::Span<const int64_t> counts) override;
  Moment Clock() override { return {clock(), version()}; }
  void SetClock(Moment clock) override { rows_.SetClock(clock.lookups, clock.version); }

  absl::Status NoteTrained(const TableCall&, const Message& message) override {
    replicas_.NoteTrained(message);
    return absl::OkStatus();
  }
  absl::Status TakeUnsynced(const TableCall&, const FusedrecUnsyncedSink& sink) override {
    return replicas_.TakeUnsynced(sink);
  }
  int64_t width() const override { return format(0).numbers(); }
  absl::Status ReadNumbers(const TableCall& call, absl::Span<const int64_t> ids, absl::Span<const int64_t> splits,
                           float* numbers, int64_t size) override;
  absl::Status Merge(const TableCall&, const FusedrecMerge& merge) override { return replicas_.Merge(merge); }

  RowRecords& records() { return records_; }
  // Returns whether rows of the lookup of this clock may have left or moved since. Its handles are then invalid.
  bool IsStale(uint32_t clock) const { return rows_.pins().IsStale(clock); }
  const RowHeader& HeaderOf(int64_t handle) const { return *rows_.Header(static_cast<uint32_t>(handle)); }
  int64_t HandleOf(const SegmentId& key) const {
    const uint64_t hash = TableHash(key.id);
    const uint32_t handle = rows_.ShardWith(hash).keys[key.segment].Find(key.id, hash);
    return handle == kAbsent ? kNoRow : int64_t{handle};
  }

 protected:
  // Lookup without the check that the look-ahead, if any, is of this message.
  absl::Status LookUp(const TableCall& call, const Message& message, int64_t window, const Ahead* ahead,
                      const RowsOut& rows, int32_t* inverse, int64_t* handles, int64_t* num_rows);
  // Begins an update of rows of the lookup of this clock (0: none has a row). Returns the version that it makes.
  uint32_t BeginUpdate(uint32_t clock);

  const uint64_t number_;  // a hash of the number of tables that this process made before

 private:
  class TrainingLookup;  // one call of Lookup (lookup.cc)

  bool IsHandle(int64_t handle) const;
  absl::Status CheckAhead(const TableCall& call, const Message& message, const Ahead& ahead) const;
  // Checks handles and inverse. *clock: of the handles' lookup, 0 where none has a row.
  absl::Status CheckGradients(const Gradients& grads, uint32_t* clock) const;
  // Tells look-aheads of other messages and of other tables apart.
  uint64_t FingerprintOf(const TableCall& call, const Message& message) const {
    return number_ + fusedrec::FingerprintOf(message, segments(), call.parallel_for);
  }
  struct Reading;  // what a read does with an id (look_ahead.cc)
  void ReadRows(const Message& message, const ParallelFor& parallel_for, const RowsOut& rows, const Reading& reading) const;
  // Adds gradients to the sums of their rows. Trains the rows that do not wait for more.
  //   waits [handles]; by: null where all rows wait
  absl::Status Train(const TableCall& call, const Gradients& in, const std::vector<uint8_t>& waits, const RuleStep* by,
                     std::vector<int32_t>* left_out);
  void UpdateRow(const RuleStep& step, uint32_t handle, float* grad, uint32_t version, float* scratch);

  ShardedRows rows_;
  FileTier tier_;
  Evictor evictor_;
  Demoter demoter_;
  RowRecords records_;
  Replicas replicas_;
  std::mutex accumulator_mutex_;  // guards the members below
  Accumulator accumulator_;
  uint32_t update_ = 0;  // version that the update under way makes
};

}  // namespace fusedrec
