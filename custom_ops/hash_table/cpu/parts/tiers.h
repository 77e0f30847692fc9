// Rows that move between the pools of a table: between float32 and 16 bits, and between memory and a file.
//
// # Demotion
// Rows of a mixed table that are no longer hot go back to 16 bits (MTGRBoost, section 5.2).
// Counts decay (Limits::CountAt), so the count of a row falls below hot_after while no lookup touches it. A walk finds such
// rows. Within frequency_decay_steps lookups it visits each of the 64 shards of a segment once, so a lookup pays for a part
// of the segment only. The walk reads the keys of a shard, whose handles tell the pool, and the headers of float32 rows.
//
// A shard is a range of a hash of the id. So the lookup at which a row is demoted follows from its id and its own lookups:
// it is the same on any number of ranks, beside other tables, and in a run that is resumed.
//
// Rows in use stay until the next visit (pinned_rows.h). A lookup demotes at its end. Only then is every row that it
// touched pinned, and a look-ahead or a peek of the next lookup reads what that lookup answers.
//
// # The tier below memory
// Rows beyond memory_budget lie in a file (FusedRec, section 4; NestPipe, section IV).
// A lookup brings the rows that it needs into memory (ShardedRows::MoveRow), where they are trained. The coldest rows go
// back. Rows move bit by bit, so a table that spills trains exactly like a table that does not.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "hash_table/cpu/rows/sharded_rows.h"

namespace fusedrec {

class Demoter {
 public:
  explicit Demoter(ShardedRows* rows) : rows_(rows) {}

  // Demotes the cold rows of the shards that are due at the lookup of this clock. Fails when there is no memory for a row
  // of 16 bits; that row and the later ones then stay as they are.
  absl::Status DemoteCold(uint32_t clock);

 private:
  absl::Status DemoteIn(Shard* shard, int64_t segment, uint32_t clock, const Pins& pins);

  ShardedRows* const rows_;
};

class FileTier {
 public:
  explicit FileTier(ShardedRows* rows) : rows_(rows) {}

  bool is_on() const { return rows_->spec().memory_budget > 0; }
  // Pool of a row that comes from a checkpoint or a replica: memory as long as it has room.
  int PoolWithRoom() const { return is_on() && rows_->store().size(0) >= memory_rows() ? 1 : 0; }
  // The caller of these two methods holds the room mutex.
  // Fails when not enough rows may go to the file, or leave, for so many rows in memory.
  absl::Status RequireRoom(int64_t new_rows) const;
  // Makes room in memory for so many rows. Fails as RequireRoom does, or when the file cannot grow.
  absl::Status MakeRoom(int64_t new_rows);
  // Asks the disk for the rows of these ids that lie in the file; returns at once.
  void Prefetch(const Message& message) const;

 private:
  // Rows that the memory budget holds.
  int64_t memory_rows() const;
  int64_t ExcessWith(int64_t new_rows) const;
  absl::Status Full(int64_t lacking) const;

  ShardedRows* const rows_;
};

}  // namespace fusedrec
