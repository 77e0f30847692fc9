// The rows that leave a table, or move between its pools: between memory and a file, and between float32 and 16 bits.
//
// # Eviction
// LRU and LFU at max_rows, and the time to live of rows, by the limits of each segment. LFU compares the counts
// as they have decayed by then. Rows in use stay (pinned_rows.h).
//
// A scan of the whole segment finds the rows that rank lowest. It takes 1/16 of max_rows more than needed, so that scans
// are rare. In a table of millions of rows such a scan would stop training for seconds. Beyond kFewRows rows, a lookup
// therefore scans so many of the 1,024 parts of the hash that the lowest 1/16 of their rows is enough, and the next
// lookup scans other parts. The hash spreads rows evenly, so the rows that leave are about the lowest 1/16 of the table.
// Which these are depends on the clock and on the rows alone.
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

#include <deque>

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
  // The first lookup of a minute begins a pass over all shards.
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
  int64_t memory_rows() const;
  int64_t ExcessWith(int64_t new_rows) const;
  absl::Status Full(int64_t lacking) const;

  ShardedRows* const rows_;
};

}  // namespace fusedrec
