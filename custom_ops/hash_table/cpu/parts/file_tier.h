// The tier below memory: rows beyond memory_budget lie in a file (FusedRec, section 4; NestPipe, section IV).
//
// A lookup brings the rows that it needs into memory (ShardedRows::MoveRow), where they are trained. The coldest rows go
// back. Rows move bit by bit, so a table that spills trains exactly like a table that does not.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "hash_table/cpu/rows/sharded_rows.h"

namespace fusedrec {

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
