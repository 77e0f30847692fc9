// Demotion: rows of a mixed table that are no longer hot go back to 16 bits (MTGRBoost, section 5.2).
//
// Counts decay (Limits::CountAt), so the count of a row falls below hot_after while no lookup touches it. A walk finds such
// rows. Within frequency_decay_steps lookups it visits each of the 64 shards of a segment once, so a lookup pays for a part
// of the segment only. The walk reads the keys of a shard, whose handles tell the pool, and the headers of float32 rows.
//
// A shard is a range of a hash of the id. So the lookup at which a row is demoted follows from its id and its own lookups:
// it is the same on any number of ranks, beside other tables, and in a run that is resumed.
//
// Rows in use stay until the next visit (pinned_rows.h). A lookup demotes at its end. Only then is every row that it
// touched pinned, and a look-ahead or a peek of the next lookup reads what that lookup answers.
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

}  // namespace fusedrec
