// Eviction: LRU and LFU at max_rows, and the time to live of rows, by the limits of each segment. LFU compares the counts
// as they have decayed by then. Rows in use stay (pinned_rows.h).
//
// A scan of the segment finds the exact rows. It chooses 1/16 of max_rows more than needed, so that scans are rare.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "hash_table/cpu/rows/sharded_rows.h"

namespace fusedrec {

// (segment, id), sorted, of the rows that a lookup is about to move into memory. It has not touched them yet, but they
// must stay.
using WaitingIds = std::vector<std::pair<int64_t, int64_t>>;

class Evictor {
 public:
  explicit Evictor(ShardedRows* rows) : rows_(rows) {}

  // The caller of these two methods holds the room mutex.
  // Makes room for new ids of a segment under max_rows, or with `evicts` false only looks for it. Fails when not enough rows
  // may leave.
  absl::Status MakeRoom(int64_t segment, int64_t new_ids, const WaitingIds& waiting, bool evicts);
  // Evicts the `count` rows that the policy ranks lowest; none without a policy. Returns how many left.
  int64_t EvictWorst(int64_t segment, int64_t count, const WaitingIds& waiting = {});

  // Evicts the rows whose time to live is over at the lookup of this clock.
  void EvictExpired(uint32_t clock);
  // Returns whether a row of a segment whose rows expire at the lookup of these pins does so.
  bool HasExpired(int64_t segment, const RowHeader& header, const Pins& pins) const {
    return rows_->limits(segment).IsOver(header.last, pins.now, pins.window) && !pins.Hold(header);
  }

 private:
  ShardedRows* const rows_;
};

}  // namespace fusedrec
