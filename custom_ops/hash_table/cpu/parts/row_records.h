// Rows as checkpoints hold them: a copy of row and slots, bit for bit, with the counters of the row's header.
//
// RecordLayout says how a record lies in memory, packed and little-endian. Numbers have the table's storage. Rows of a 16-bit
// pool beside a float32 one are widened, which loses nothing, and `pool` says where they go back to.
#pragma once

#include "common/parallel.h"
#include "hash_table/cpu/parts/eviction.h"
#include "hash_table/cpu/rows/sharded_rows.h"

namespace fusedrec {

class RowRecords {
 public:
  RowRecords(ShardedRows* rows, const FileTier* tier) : rows_(rows), tier_(tier) {}

  int bytes() const { return static_cast<int>(layout().bytes()); }  // of one record
  static uint32_t UpdatedOf(const char* record);
  // records [handles.size() * bytes()]
  void Read(absl::Span<const int64_t> handles, const ParallelFor& parallel_for, char* records) const;
  // Inserts or overwrites distinct ids.
  absl::Status Write(int64_t segment, absl::Span<const int64_t> ids, const char* records,
                     const ParallelFor& parallel_for);
  // Writes row, slots and version of each record that is newer than the row. The counts of lookups stay. Ids that have
  // left since are skipped. For rows that are trained elsewhere, between two lookups, and come back (host_rows.cc).
  void WriteTrained(absl::Span<const SegmentId> keys, const char* records, const ParallelFor& parallel_for);

 private:
  RecordLayout layout() const { return RecordLayout(rows_->format(0).layout()); }
  void WriteNumbers(const char* record, uint32_t handle);
  absl::Status WriteOne(Shard* shard, int64_t segment, int64_t id, const char* record);
  // Calls visit(shard, places) for each shard, under its mutex, with the places of its ids id_of(0) to id_of(n - 1).
  template <typename IdOf, typename Visit>
  void ForEachShard(int64_t n, const IdOf& id_of, const ParallelFor& parallel_for, const Visit& visit);

  ShardedRows* const rows_;
  const FileTier* const tier_;
};

}  // namespace fusedrec
