// A table on a GPU that is larger than the device: rows are in host memory, the rows of two batches on the device, and hot
// rows, which stay there.
//
// A HashTable in host memory decides which rows exist, are new and leave. It has the counts, clocks, options and
// checkpoints. The device trains the rows, in the two buffers of NestPipe, section IV-B (buffer_cuda.h). HostRows moves
// rows between the two.
//
//   look-ahead of t + 1   The ids of t + 1 are in host memory. The host finds their rows and copies them to the device, but
//                         for hot rows. Meanwhile the rows of batch t - 1 come back; rows of both batches follow behind them.
//                         The tables do not change.
//   lookup of t + 1       The host counts, inserts and evicts. It sends late rows to the device: rows that are new or were
//                         changed elsewhere since the look-ahead. The buffers change roles, rows of batch t begin to
//                         come back, and the device looks up. Rows of batch t that are hot go to their slots.
//   update of t + 1       The device updates alone. The host only counts the version.
//
// The result equals a HashTable bit for bit; clock and version on the device are the host's. A lookup without a look-ahead
// first runs one itself, at full cost. There is one look-ahead at a time: the lookup of an earlier one begins anew.
//
// # Hot rows
// With hot_rows, rows of the pool (hot_rows.h) go back to host memory when others take their slots, or when a call reads or
// changes rows in host memory: evaluation, saves, evictions by hand. Calls that change rows also empty the pool.
//
// # Rows that leave while they are on the device
// The window is one lookup, so the lookup of t + 1 may evict a row of batch t, but no lookup before. The record of such a
// row comes back and is skipped. An id never leaves and returns inside one lookup, so no row that the device refreshes for
// t + 1 belongs to an earlier id.
//
// A lookup may fail for want of device memory after it has evicted rows of batch t. Batch t is then stale in host memory. Its gradients are refused, as in any table. The lookup after that first takes back the rows that are left
// and drops the batch on the device. It would else refresh the new row of an id from the old one.
//
// Every other change of rows in host memory (imports, removals by hand) takes back the rows on the device and drops them
// there. Later gradients of these rows are refused, too.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cuda/buffer/buffer_cuda.h"
#include "hash_table/cuda/kernels/hot_rows.h"
#include "hash_table/cuda/kernels/next_batch.h"
#include "hash_table/cuda/kernels/row_transfers.h"

namespace fusedrec {

// The lookup's handles and inverse, and gradients of the received ids, as arguments of fusedrec_table_apply.
struct DeviceGradients {
  const int64_t* handles;
  int64_t num_rows;
  const int32_t* inverse;
  int64_t num_ids;
  const void* grads;
  int64_t storage;
  float scale;
};

class HostRows {
 public:
  // A message, with the threads and the stream of the call.
  struct Call {
    FusedrecMessage message;
    int64_t num_entries;
    const ParallelFor& parallel_for;
    void* stream;
    bool entries_on_host = false;  // else they are on the device
  };
  enum class Access { kNumbers, kRows, kChange };  // reads statistics; reads rows; changes rows or their values

  static absl::StatusOr<std::unique_ptr<HostRows>> Make(const TableSpec& spec, const FusedrecAllocator& allocator, void* stream);
  ~HostRows() { fusedrec_buffer_destroy(buffer_); }
  HostRows(const HostRows&) = delete;
  HostRows& operator=(const HostRows&) = delete;

  // look_ahead: number that names this look-ahead to its lookup; never 0. With entries in host memory it waits for no kernel.
  absl::Status LookAhead(const Call& call, int64_t* look_ahead);
  // Arguments as in fusedrec_table_lookup; look_ahead 0: no look-ahead.
  absl::Status Lookup(const Call& call, int64_t look_ahead, int64_t storage, void* rows, int64_t out_rows,
                      int32_t* inverse, int64_t* handles, int64_t* num_rows);
  // rows [V, dim] of `storage`, in host memory. `peeks`: those that the next training lookup would answer.
  absl::Status Find(const Call& call, Storage storage, void* rows, bool peeks);
  absl::Status Prefetch(const Call& call);
  // Arguments as in fusedrec_table_apply. Sums are of parts of the last lookup, because its rows alone are on the device.
  absl::Status Apply(const DeviceGradients& grads, const Step& step, int32_t* left_out, int64_t* num_left_out,
                     void* stream);
  absl::Status Accumulate(const DeviceGradients& grads, bool begin, int32_t* left_out, int64_t* num_left_out,
                          void* stream);
  absl::Status ApplyAccumulated(const Step& step, void* stream);
  // Calls `use` with the table in host memory, after its rows are brought to the state that `access` needs.
  absl::Status OnHost(Access access, const ParallelFor& parallel_for, void* stream,
                      const std::function<absl::Status(HashTable*)>& use);
  // RowTransfers::Traffic, since the table was made.
  std::vector<int64_t> Traffic() const;

 private:
  HostRows(std::unique_ptr<HashTable> table, FusedrecDeviceBuffer* buffer)
      : table_(std::move(table)),
        buffer_(buffer),
        hot_(table_->spec().hot_rows, table_->segments()),
        transfers_(table_.get(), buffer) {}
  absl::Status StatusOf(int answer) const { return transfers_.StatusOf(answer); }
  // Copies the ids of a call to the host and checks them. Waits for the stream where they are on the device.
  absl::Status Receive(const Call& call, NextBatch* batch) const;
  absl::Status ReadAhead(const Call& call);
  absl::Status WriteBack(const ParallelFor& parallel_for);
  // Whether gradients may train the active rows: all of them are still those of their lookup.
  bool IsTrainable() const { return trainable_ && !table_->IsStale(clock_); }
  // The active rows leave the device, so no gradient trains them.
  void LoseSums();
  absl::Status TakeActiveBack(const ParallelFor& parallel_for, void* stream);
  // Brings all rows in host memory up to date.
  absl::Status TakeBack(const ParallelFor& parallel_for, void* stream);
  // Forgets the rows of batches on the device; the pool stays.
  absl::Status DropBatches(void* stream);
  // Takes the active rows back and drops them, if some of them may have left the table.
  absl::Status DropLeft(const ParallelFor& parallel_for, void* stream);

  const std::unique_ptr<HashTable> table_;
  FusedrecDeviceBuffer* const buffer_;
  mutable std::mutex mutex_;  // one call at a time
  HotRows hot_;
  RowTransfers transfers_;
  NextBatch seen_;
  int64_t look_aheads_ = 0;
  BatchRows active_;                // rows of the batch on the device
  std::vector<SegmentId> waiting_;  // rows that wait to go back, in their order there
  uint32_t clock_ = 0;       // of the lookup whose rows are active
  bool trainable_ = false;   // whether they are, as that lookup left them
  bool is_trained_ = false;  // whether they are newer than in host memory
  bool has_sums_ = false;    // whether gradients wait for their update
  bool sums_are_lost_ = false;  // whether rows have left the device since
};

}  // namespace fusedrec
