// Eviction: LRU and LFU at max_rows, and the time to live of rows, by the limits of each segment. LFU compares the counts
// as they have decayed by then. Rows in use stay (pinned_rows.h).
//
// A scan of the whole segment finds the rows that rank lowest. It takes 1/16 of max_rows more than needed, so that scans
// are rare. In a table of millions of rows such a scan would stop training for seconds. Beyond kFewRows rows, a lookup
// therefore scans so many of the 1,024 parts of the hash that the lowest 1/16 of their rows is enough, and the next
// lookup scans other parts. The hash spreads rows evenly, so the rows that leave are about the lowest 1/16 of the table.
// Which these are depends on the clock and on the rows alone.
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

  // Evicts the rows whose time to live is over at the lookup of this clock. The rows that a new minute has made too old
  // leave over several lookups where there are more than kFewRows rows.
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

  // A scan of so many rows does not stop training.
  static constexpr int64_t kFewRows = 1 << 16;

  // Evicts at least `count` rows, the lowest of some parts. Returns how many left, less where not enough may leave.
  int64_t EvictInParts(int64_t segment, int64_t count, const WaitingIds& waiting);
  int64_t EvictLowest(int64_t segment, int64_t count, const WaitingIds& waiting, Parts parts);
  // Evicts the rows of a shard with is_over(header). Returns how many rows it looked at.
  template <typename IsOver>
  int64_t EvictExpiredIn(Shard* shard, int64_t segment, const Pins& pins, const IsOver& is_over);
  // Notes a lookup, which begins a pass over all shards if it is the first one of its minute.
  void NoteMinute(uint32_t clock);
  // Takes the next shard of the pass, and the clocks below which the rows of each segment are too old. False: it is over.
  bool NextOfMinute(int* shard, std::vector<uint32_t>* oldest);

  ShardedRows* const rows_;
  int64_t most_minutes_ = 0;
  std::mutex minutes_mutex_;  // guards the members below
  std::deque<Minute> minutes_;  // ascending, of the last most_minutes_
  std::vector<uint32_t> oldest_;  // of the pass, by segment
  int next_shard_ = kShards;      // of the pass
};

}  // namespace fusedrec
