// A table as its ops see it, wherever its rows are: in host memory (cpu/hash_table.h), on a device (cuda/device_table.h), or
// in host memory for training on a device (cuda/host_rows.cc).
//
// The kernels check what is in host memory on both devices: ranks, sizes, settings. The table checks the rest.
// Spans and pointers are on the device of the op, unless their comment says that they are in host memory.
#pragma once

#include <mutex>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/limits.h"
#include "common/parallel.h"
#include "common/try.h"
#include "hash_table/cpu/rows/distinct_ids.h"
#include "hash_table/cuda/hash_table_cuda.h"
#include "hash_table/options.h"
#include "hash_table/row_layout.h"

namespace fusedrec {

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

struct TableCall {
  const ParallelFor& parallel_for;
  void* stream = nullptr;                     // of the op's device
  const FusedrecAllocator* memory = nullptr;  // on the device, until the op ends; null: the op runs on a CPU

  bool is_on_cpu() const { return memory == nullptr; }
};

// The rows that an op returns: [size, dim], zeros after V; no data: it returns none.
struct RowsOut {
  void* data;
  Storage storage;
  int64_t size;
};

// Sums of rows of received ids (partial_sums.h); empty: rows themselves.
struct RowSums {
  absl::Span<const int32_t> index;   // [T], place of each term among the received ids (the kernel checks)
  absl::Span<const int64_t> splits;  // [M+1], bounds of the sums inside index
};

// A lookup's handles and inverse, and gradients of the received ids, or of sums of their rows.
struct Gradients {
  absl::Span<const int64_t> handles;
  absl::Span<const int32_t> inverse;  // [V]
  const void* grads;                  // [>= V, dim], or [M, dim]
  Storage storage;
  float scale;
  RowSums sums = {};
  // Of Apply, on a CPU: inverses of later gradients of this lookup and update, and whether this is the first of them.
  std::vector<absl::Span<const int32_t>> coming = {};
  bool begin = true;
};

// The numbers of the op TableStatistics, in host memory.
struct TableStatistics {
  std::vector<SegmentStatistics> segments;
  std::vector<int64_t> bytes;    // of keys, of rows, of rows in the second pool; rows in each of the pools
  std::vector<int64_t> traffic;  // [segments, 3], of rows in host memory for a device; empty: zeros
};

class Table {
 public:
  // What an op does with rows that may be on a device or in host memory: it works where they are, reads them in host
  // memory, or changes them there.
  enum class Access { kAsTheyAre, kRead, kChange };

  virtual ~Table() = default;
  virtual const TableSpec& spec() const = 0;
  int64_t segments() const { return static_cast<int64_t>(spec().seeds.size()); }

  // Begins every op. A table whose ops may not overlap is locked until the lock ends.
  virtual absl::StatusOr<std::unique_lock<std::mutex>> Begin(const TableCall&, Access) {
    return std::unique_lock<std::mutex>();
  }

  // The training step. `ahead`, which may be null, has the mark of a look-ahead in version, moves and fingerprint, and on
  // a CPU its handles; there, `rows` begin as its rows. window: lookups, this one included, whose gradients are to come.
  // Their rows neither leave nor move until the next lookup.
  //   inverse [V], handles [V]  out: *num_rows of the handles are written
  virtual absl::Status Lookup(const TableCall& call, const Message& message, int64_t window, const Ahead* ahead,
                              const RowsOut& rows, int32_t* inverse, int64_t* handles, int64_t* num_rows) = 0;
  // Where rows of the last lookup are, until the next op. Returns false where some may not be float32 in memory.
  virtual bool FloatsOf(absl::Span<const int64_t>, std::vector<const float*>*) const { return false; }
  // The message is in host memory. On a device, rows and handles are empty.
  virtual absl::Status LookAhead(const TableCall& call, const Message& message, const RowsOut& rows,
                                 absl::Span<int64_t> handles, Ahead* mark) = 0;
  // window: reads the rows that the next Lookup, of this window, would answer; 0: inference.
  virtual absl::Status Read(const TableCall& call, const Message& message, int64_t window, const Ahead* ahead,
                            const RowsOut& rows) = 0;
  // The message is in host memory.
  virtual absl::Status Prefetch(const TableCall&, const Message&) { return absl::OkStatus(); }
  // left_out: in host memory, ascending.
  virtual absl::Status Apply(const TableCall& call, const Gradients& grads, const Step& step,
                             std::vector<int32_t>* left_out) = 0;
  virtual absl::Status Accumulate(const TableCall& call, const Gradients& grads, bool begin,
                                  std::vector<int32_t>* left_out) = 0;
  virtual absl::Status ApplyAccumulated(const TableCall& call, const Step& step) = 0;

  // Contents, in host memory.
  virtual absl::Status Statistics(TableStatistics* statistics) = 0;
  virtual absl::Status Keys(const TableCall& call, int64_t segment, Moment since, std::vector<int64_t>* ids,
                            std::vector<int64_t>* handles) = 0;
  virtual int64_t record_bytes() const = 0;
  virtual absl::Status ReadRecords(const TableCall& call, absl::Span<const int64_t> handles, char* records) = 0;
  virtual absl::Status Import(const TableCall& call, int64_t segment, absl::Span<const int64_t> ids,
                              const char* records) = 0;
  virtual absl::Status Remove(const TableCall& call, int64_t segment, absl::Span<const int64_t> ids, int64_t* removed) = 0;
  virtual absl::Status Evict(const TableCall& call, int64_t segment, int64_t count, int64_t* evicted) = 0;
  virtual absl::Status Clear(const TableCall& call) = 0;
  virtual absl::Status Tombstones(const TableCall& call, int64_t segment, std::vector<int64_t>* ids) = 0;
  virtual void ForgetTombstones() = 0;
  virtual absl::Status Candidates(const TableCall& call, int64_t segment, std::vector<int64_t>* ids,
                                  std::vector<int64_t>* counts) = 0;
  virtual absl::Status SetCandidates(const TableCall& call, int64_t segment, absl::Span<const int64_t> ids,
                                     absl::Span<const int64_t> counts) = 0;
  virtual Moment Clock() = 0;
  virtual void SetClock(Moment clock) = 0;

  // Replicas that are averaged. The first two and Merge: only of a table that is `averaged`.
  virtual absl::Status NoteTrained(const TableCall& call, const Message& message) = 0;
  virtual absl::Status TakeUnsynced(const TableCall& call, const FusedrecUnsyncedSink& sink) = 0;
  virtual int64_t width() const = 0;  // numbers of a row and its slots
  // splits: in host memory. numbers: [size, width], zeros after the rows of ids.
  virtual absl::Status ReadNumbers(const TableCall& call, absl::Span<const int64_t> ids, absl::Span<const int64_t> splits,
                                   float* numbers, int64_t size) = 0;
  virtual absl::Status Merge(const TableCall& call, const FusedrecMerge& merge) = 0;
};

// Refusals of more than one table.

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

// Makes a table of class T. args: of its Open.
template <typename T, typename... Args>
absl::Status OpenTable(const TableSpec& spec, std::unique_ptr<Table>* table, const Args&... args) {
  auto made = std::make_unique<T>(spec);
  FUSEDREC_TRY(made->Open(args...));
  *table = std::move(made);
  return absl::OkStatus();
}

// Two writers of one row would leave parts of both.
inline absl::Status RequireDistinct(const char* name, absl::Span<const int64_t> ids, const char* remedy) {
  const int64_t repeat = FirstRepeat(ids.data(), ids.size());
  if (repeat < 0) return absl::OkStatus();
  return Invalid(name, " must be distinct, got ", ids[repeat], " twice. Nothing has changed. Remedy: ", remedy);
}

inline absl::Status RequireTrainable(const TableSpec& spec) {
  if (spec.storage != Storage::kInt8) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      spec.NameOf(0), " has rows in int8, which a server reads and nothing trains. Use another storage.dtype."));
}

inline absl::Status RequireAveraged(const TableSpec& spec) {
  if (spec.averaged) return absl::OkStatus();
  return absl::FailedPreconditionError("this table was not made with averaged=True, so it does not know what changes.");
}

}  // namespace fusedrec
