// The specification of a table, and the inputs and outputs of its lookups.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "hash_table/rules/rules.h"
#include "hash_table/table_limits.h"
#include "hash_table/table_options.h"
#include "initial_rows/initial_rows.h"

namespace fusedrec {

// The specification of a table; the same on all ranks.
struct TableSpec : TableOptions {
  AnyRule rule;
  std::vector<uint64_t> seeds;     // one per segment; as many segments as seeds
  std::vector<Limits> limits;      // of the segments; empty: no segment has one
  std::vector<std::string> names;  // of the segments, for messages; may be empty
  int64_t memory_budget = 0;  // > 0: bytes of rows in memory; rows beyond are kept in a file
  std::string tier_folder;    // of that file
  bool host_rows = false;     // device tables only: rows in host memory, the rows of two batches on the device
  int64_t hot_rows = 0;       // with host_rows: further rows on the device, the most frequent ones

  // The segment in messages.
  std::string NameOf(int64_t segment) const {
    return names.empty() ? absl::StrCat("segment ", segment) : absl::StrCat("table '", names[segment], "'");
  }
};

inline absl::Status RequirePools(const TableSpec& spec) {
  if (spec.hot_after == 0 || (spec.memory_budget == 0 && spec.storage == Storage::kFloat32)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "hot_after moves rows between a 16-bit and a float32 pool: it needs storage 'float32' and no memory budget.");
}

inline absl::Status ClockEnds() {
  return absl::ResourceExhaustedError(absl::StrCat(
      "the table's clock is at ", kMostClock, ", the last lookup that it can count. The table is what it was. Remedy: a new ",
      "table with the rows of this one, whose clock begins at 0 (checkpoint.warm_start)."));
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
  int64_t version, moves;             // of the table then
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
};

constexpr int64_t kNoRow = -1;  // handle of an id that has no row yet, because admission refuses it for example

}  // namespace fusedrec
