// The inputs and outputs of a table's lookups.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/try.h"
#include "hash_table/options.h"
#include "initial_rows/initial_rows.h"

namespace fusedrec {

inline absl::Status ClockEnds() {
  return absl::ResourceExhaustedError(absl::StrCat(
      "the table's clock is at ", kMostClock, ", the last lookup that it can count. The table is what it was. Remedy: a new ",
      "table with the rows of this one, whose clock begins at 0 (checkpoint.warm_start)."));
}

inline absl::Status SumsAreWaiting() {
  return absl::FailedPreconditionError(
      "rows cannot be removed while accumulated gradients wait for their update. Remove them after it.");
}

// lookup: which one, of one call.
inline absl::Status RowsAreStale(const std::string& lookup) {
  return absl::FailedPreconditionError(absl::StrCat(
      "rows of ", lookup, " have been evicted, removed or moved by a later one before their gradients came: updating them ",
      "now would change other rows. Nothing was updated. Take gradients before the next training lookup, and pass ",
      "training=False to lookups that are not trained."));
}

inline absl::Status ReplicasAreFull(const TableSpec& spec, int64_t segment) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "max_rows_per_rank of ", spec.NameOf(segment), " is ", spec.limits[segment].max_rows, ", but its replicas have more ",
      "rows together that may not leave. Remedy: a larger max_rows_per_rank, an eviction policy, or a smaller sync_every."));
}

// A received message (rank_partition.h), checked: for each source the counts of all segments, then its ids.
struct Message {
  absl::Span<const int64_t> entries;        // [V + R * S]
  absl::Span<const int32_t> source_splits;  // [R]
  int64_t num_ids;                          // V
};

// The result of a look-ahead (look_ahead.cc). A lookup of the same message begins from it.
struct Ahead {
  absl::Span<const int64_t> handles;  // [V], row of each received id; kNoRow: it had none
  int64_t version, moves;             // of the table then; with host_rows, version is the number of the look-ahead
  uint64_t fingerprint = 0;           // of the message
};

// The destination of rows: [V, D] numbers; null for none.
struct RowSink {
  void* data;
  Storage storage;
};

struct SegmentStatistics {
  int64_t keys = 0, hits = 0, inserts = 0, evictions = 0, refused = 0, candidates = 0;
};

struct SegmentId {
  int64_t segment, id;

  friend bool operator==(const SegmentId& a, const SegmentId& b) { return a.segment == b.segment && a.id == b.id; }
  template <typename Hash>
  friend Hash AbslHashValue(Hash hash, const SegmentId& key) {
    return Hash::combine(std::move(hash), key.segment, key.id);
  }
};

constexpr int64_t kNoRow = -1;  // handle of an id that has no row yet, because admission refuses it for example

}  // namespace fusedrec
