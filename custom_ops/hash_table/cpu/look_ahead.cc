// Reading: inference, and what precedes a training lookup: its look-ahead (NestPipe, section IV: the prefetch buffer), and
// a peek at its rows.
//
// # Look-ahead
// While batch t computes, a look-ahead finds the rows of batch t+1, asks the disk for those in the file, and copies them.
// It changes nothing in the table. A look-ahead without a lookup leaves no trace, and a checkpoint in between equals
// one without look-ahead. The lookup that follows counts, inserts and evicts at its own clock, exactly as without
// look-ahead. It does not search for the rows already found, and it writes only the rows that were updated meanwhile
// (the intersection of NestPipe, section IV-B). The header of a row has the version that changed it last.
//
// # Rows in flight
// The handles of a look-ahead are valid until any row leaves or moves, which ShardedRows::moves counts. In a training step
// nothing does that between a look-ahead and its lookup. After any other such change (a lookup of the same step, an
// eviction by hand, a restore), the lookup searches again. Pinning the rows instead would evict other rows than training
// without look-ahead evicts.
//
// # Peek
// Replicas of a table must count the ids of all groups of ranks, but a rank sends the rows of its own group only. So it
// peeks at the rows of its group, and looks the ids of all groups up without rows. A peek answers what that lookup would:
// an id without a row, or whose row expires at that lookup, has its initial row.

#include "common/hash.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cpu/parts/message_runs.h"

namespace fusedrec {

struct HashTable::Reading {
  absl::Span<int64_t> seen;  // out: row of each id; ids without a row are only marked here. Empty: their row is written
  bool zeros;                // whether that row is zeros; else it is the initial one
  const Ahead* ahead;        // look-ahead that wrote the rows; null: none has
  const Pins* coming;        // of the lookup at which rows expire; null: none do
};

void HashTable::ReadRows(const Message& message, const ParallelFor& parallel_for, const RowsOut& rows,
                         const Reading& reading) const {
  constexpr int64_t kPiece = 1024;  // ids of one unit of work
  const std::vector<MessageRun> runs = RunsOf(message, segments(), kPiece);
  constexpr int kAhead = 12;
  const int64_t row_bytes = int64_t{spec().dim} * BytesOf(rows.storage);
  parallel_for(runs.size(), kPiece * (100 + row_bytes / 4), [&](int64_t begin, int64_t end) {
    const ShardedRows::Reader reader(&rows_);
    // No other id gets a row that leaves from here on.
    const bool is_valid = reading.ahead != nullptr && reading.ahead->moves == rows_.moves();
    const auto known = [&](int64_t position) { return is_valid ? reading.ahead->handles[position] : kNoRow; };
    std::vector<char> initial;
    for (int64_t r = begin; r < end; ++r) {
      const MessageRun& run = runs[r];
      const int64_t* ids = &message.entries[run.entry];
      const Shards expired = reading.coming != nullptr ? rows_.limits(run.segment).ExpiredAt(reading.coming->now) : Shards{};
      uint32_t handles[2 * kAhead];
      const auto keys_of = [&](uint64_t hash) -> const KeyIndex& { return rows_.ShardWith(hash).keys[run.segment]; };
      for (int64_t i = 0; i < run.count + 2 * kAhead; ++i) {
        if (i < run.count && known(run.position + i) == kNoRow) {
          const uint64_t hash = TableHash(ids[i]);
          keys_of(hash).Prefetch(hash);
        }
        if (const int64_t j = i - kAhead; j >= 0 && j < run.count) {
          const int64_t before = known(run.position + j);
          const uint64_t hash = TableHash(ids[j]);
          const uint32_t handle = before == kNoRow ? keys_of(hash).Find(ids[j], hash) : static_cast<uint32_t>(before);
          handles[j % (2 * kAhead)] = handle;
          if (handle != kAbsent && rows.data != nullptr) rows_.store().Fetch(handle);
        }
        if (const int64_t k = i - 2 * kAhead; k >= 0) {
          const int64_t position = run.position + k;
          const uint32_t handle = handles[k % (2 * kAhead)];
          if (!reading.seen.empty()) reading.seen[position] = handle == kAbsent ? kNoRow : int64_t{handle};
          if (rows.data == nullptr) continue;
          char* const out = static_cast<char*>(rows.data) + position * row_bytes;
          const bool has_row =
              handle != kAbsent && !(expired.Hold(ShardOf(TableHash(ids[k]))) &&
                                     evictor_.HasExpired(run.segment, *rows_.Header(handle), *reading.coming));
          if (has_row) {
            const bool is_there = known(position) != kNoRow && rows_.Header(handle)->updated <= reading.ahead->version;
            if (!is_there) rows_.format(RowStore::PoolOf(handle)).CopyRow(rows_.Row(handle), rows.storage, out);
          } else if (!reading.seen.empty()) {
            continue;
          } else if (reading.zeros) {
            std::memset(out, 0, row_bytes);
          } else {
            rows_.CopyInitial(run.segment, ids[k], rows.storage, &initial, out);
          }
        }
      }
    }
  });
}

absl::Status HashTable::LookAhead(const TableCall& call, const Message& message, const RowsOut& rows,
                                  absl::Span<int64_t> handles, Ahead* mark) {
  // Read before the first row, so that every later change is newer.
  mark->moves = rows_.moves();
  mark->version = rows_.version();
  mark->fingerprint = FingerprintOf(call, message);
  tier_.Prefetch(message);  // the disk reads many pages at once
  ReadRows(message, call.parallel_for, rows, {handles, false, nullptr, nullptr});
  return absl::OkStatus();
}

absl::Status HashTable::Read(const TableCall& call, const Message& message, int64_t window, const Ahead* ahead,
                             const RowsOut& rows) {
  if (ahead != nullptr) FUSEDREC_TRY(CheckAhead(call, message, *ahead));
  if (window == 0) {
    ReadRows(message, call.parallel_for, rows, {{}, spec().unknown_zeros, nullptr, nullptr});
    return absl::OkStatus();
  }
  Pins coming = rows_.pins().Current();
  ++coming.now;
  coming.window = window;
  ReadRows(message, call.parallel_for, rows, {{}, false, ahead, &coming});
  return absl::OkStatus();
}

}  // namespace fusedrec
