// A table as one of several replicas that train apart and are averaged from time to time (2D sparse parallelism,
// Algorithm 1). Only for tables with `averaged`.
//
// An id without a row at a replica counts with its initial row in the mean, whether it never came or was evicted. An id
// that left one replica leaves all of them, unless another replica has trained it meanwhile.
#pragma once

#include "common/parallel.h"
#include "hash_table/cpu/parts/eviction.h"
#include "hash_table/cpu/rows/distinct_ids.h"
#include "hash_table/cpu/rows/sharded_rows.h"
#include "hash_table/table.h"

namespace fusedrec {

class Replicas {
 public:
  Replicas(ShardedRows* rows, const FileTier* tier, Evictor* evictor)
      : rows_(rows), tier_(tier), evictor_(evictor), trained_(rows->segments()), distinct_(rows->segments(), 0) {}

  // Notes that the rows of these ids were trained. Any thread may call it.
  void NoteTrained(const Message& message);
  // Returns and forgets, since the last call, the trained ids that have a row, by segment, then the ids that left, by
  // segment, after their counts. headers: last << 32 | count of each trained id, 0 of each other id.
  absl::Status TakeUnsynced(const FusedrecUnsyncedSink& sink);
  // numbers [ids.size() * format(0).numbers()]: row and slots of ids grouped by segment; initial numbers without a row.
  void ReadNumbers(absl::Span<const int64_t> ids, absl::Span<const int64_t> segment_splits,
                   const ParallelFor& parallel_for, float* numbers) const;
  // Removes the ids `left`, except rows in use, then sets rows of ids; both are grouped by segment. Existing rows
  // stay where they are, and keep counters above their header: of lookups that the replicas have not exchanged. `step`
  // seeds the rounding, so replicas with equal arguments get equal numbers.
  // Fails when a segment keeps more than max_rows that may not leave; all rows are then merged.
  absl::Status Merge(const FusedrecMerge& in);
  void Clear() { TakeTrained(); }

 private:
  // Returns the distinct trained ids of each segment, ascending, and forgets them.
  IdsBySegment TakeTrained();
  absl::Status WriteNumbers(Shard* shard, int64_t segment, int64_t id, const float* numbers, int64_t header,
                            uint32_t step);

  ShardedRows* const rows_;
  const FileTier* const tier_;
  Evictor* const evictor_;
  std::mutex mutex_;              // guards the members below
  IdsBySegment trained_;          // with repeats
  std::vector<size_t> distinct_;  // by segment: ids that were left when repeats were last dropped
};

}  // namespace fusedrec
