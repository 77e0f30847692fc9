// A table as its ops see it, wherever its rows are: in host memory (cpu/host_table.h), on a device (cuda/device_table.h), or
// in host memory for training on a device (cuda/host_rows.cc).
//
// The kernels check what is in host memory on both devices: ranks, sizes, settings. The table checks the rest.
// Spans and pointers are on the device of the op, unless their comment says that they are in host memory.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/parallel.h"
#include "hash_table/cpu/rows/distinct_ids.h"
#include "hash_table/cuda/hash_table_cuda.h"
#include "hash_table/row_layout.h"
#include "hash_table/table_spec.h"

namespace fusedrec {

// The op that calls a table.
struct TableCall {
  const ParallelFor& parallel_for;
  void* stream = nullptr;                     // of the op's device
  const FusedrecAllocator* memory = nullptr;  // on the device, until the op ends; null: the op runs on a CPU

  bool is_on_cpu() const { return memory == nullptr; }
};

// The rows that an op returns: [size, dim], zeros after V; no data: it returns none.
struct RowsOut : RowSink {
  int64_t size;
};

// A lookup's handles and inverse, and gradients of the received ids.
struct Gradients {
  absl::Span<const int64_t> handles;
  absl::Span<const int32_t> inverse;  // [V]
  const void* grads;                  // [>= V, dim]
  Storage storage;
  float scale;
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
  // a CPU its handles; there, `rows` begin as its rows. window: lookups, with this one, whose gradients are to come.
  //   inverse [V], handles [V]  out: *num_rows of the handles are written
  virtual absl::Status Lookup(const TableCall& call, const Message& message, int64_t window, const Ahead* ahead,
                              const RowsOut& rows, int32_t* inverse, int64_t* handles, int64_t* num_rows) = 0;
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

// Two writers of one row would leave parts of both.
inline absl::Status RequireDistinct(const char* name, absl::Span<const int64_t> ids, const char* remedy) {
  const int64_t repeat = FirstRepeat(ids.data(), ids.size());
  if (repeat < 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " must be distinct, got ", ids[repeat],
                                                 " twice. Nothing has changed. Remedy: ", remedy));
}

inline absl::Status RequireAveraged(const TableSpec& spec) {
  if (spec.averaged) return absl::OkStatus();
  return absl::FailedPreconditionError("this table was not made with averaged=True, so it does not know what changes.");
}

}  // namespace fusedrec
