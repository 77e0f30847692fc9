// Eviction: LRU and LFU at max_rows, and the time to live of rows, by the limits of each segment. LFU compares the counts
// as they have decayed by then. Rows in use stay (pinned_rows.h).
//
// A scan of the segment finds the exact rows. It chooses 1/16 of max_rows more than needed, so that scans are rare.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <mutex>
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
  explicit Evictor(ShardedRows* rows) : rows_(rows) {
    for (const int64_t minutes : rows->spec().ttl_minutes) most_minutes_ = std::max(most_minutes_, minutes);
  }

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
  // The beginning of a minute of wall time: the clock of its first lookup. Rows that a lookup of at least this clock has
  // touched are not older. So no row stores its time.
  struct Minute {
    int64_t number;
    uint32_t first_clock;
  };

  // Notes a lookup. Returns by segment the clock below which rows are too old by ttl_minutes; empty: it is not the first
  // lookup of its minute, or no segment has a ttl_minutes.
  std::vector<uint32_t> NoteMinute(uint32_t clock);

  ShardedRows* const rows_;
  int64_t most_minutes_ = 0;
  std::mutex minutes_mutex_;
  std::deque<Minute> minutes_;  // ascending, of the last most_minutes_
};

}  // namespace fusedrec
