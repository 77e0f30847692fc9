// A table on a GPU that is larger than the device: rows are in host memory, the rows of two batches on the device, and hot
// rows, which stay there.
//
// A HashTable in host memory decides which rows exist, are new and leave. It has the counts, clocks, options and
// checkpoints. The device trains the rows, in the two buffers of NestPipe, section IV-B (buffer_cuda.h). HostRowsTable
// moves rows between the two.
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
// A lookup may fail for want of device memory after it has evicted rows of batch t. Batch t is then stale in host memory.
// Its gradients are refused, as in any table. The lookup after that first takes back the rows that are left and drops the
// batch on the device. It would else refresh the new row of an id from the old one.
//
// Every other change of rows in host memory (imports, removals by hand) takes back the rows on the device and drops them
// there. Later gradients of these rows are refused, too.
#pragma once

#include <initializer_list>
#include <memory>
#include <mutex>
#include <vector>

#include "hash_table/cpu/host_table.h"
#include "hash_table/cuda/buffer/buffer_cuda.h"
#include "hash_table/cuda/device_table.h"
#include "hash_table/cuda/hot_rows.h"
#include "hash_table/cuda/next_batch.h"

namespace fusedrec {

class HostRowsTable : public HostTable {
 public:
  static absl::Status Make(const TableSpec& spec, const FusedrecAllocator& allocator, void* stream,
                           std::unique_ptr<Table>* made);
  ~HostRowsTable() override { fusedrec_buffer_destroy(buffer_); }

  // One call at a time.
  absl::StatusOr<std::unique_lock<std::mutex>> Begin(const TableCall& call, Access access) override;
  // With the message in host memory it waits for no kernel.
  absl::Status LookAhead(const TableCall& call, const Message& message, const RowsOut& rows, absl::Span<int64_t> handles,
                         Ahead* mark) override;
  absl::Status Lookup(const TableCall& call, const Message& message, const Ahead* ahead, const RowsOut& rows,
                      int32_t* inverse, int64_t* handles, int64_t* num_rows) override;
  // A look-ahead is of no use here: no row is on the device because of it.
  absl::Status Read(const TableCall& call, const Message& message, const Ahead* ahead, bool peeks,
                    const RowsOut& rows) override;
  // Sums are of parts of the last lookup, because its rows alone are on the device.
  absl::Status Apply(const TableCall& call, const Gradients& grads, const Step& step,
                     std::vector<int32_t>* left_out) override;
  absl::Status Accumulate(const TableCall& call, const Gradients& grads, bool begin,
                          std::vector<int32_t>* left_out) override;
  absl::Status ApplyAccumulated(const TableCall& call, const Step& step) override;
  absl::Status Statistics(TableStatistics* statistics) override;
  absl::Status ReadNumbers(const TableCall&, absl::Span<const int64_t>, absl::Span<const int64_t>, float*,
                           int64_t) override {
    return RequireAveraged(spec());
  }

 private:
  // Of lookups, by segment: rows in the pool, rows that went to the device, and rows that came back.
  struct Traffic {
    int64_t hits = 0, sent = 0, returned = 0;
  };

  HostRowsTable(std::unique_ptr<HashTable> table, FusedrecDeviceBuffer* buffer)
      : HostTable(std::move(table)), buffer_(buffer), hot_(spec().hot_rows, segments()), traffic_(segments()) {}
  absl::Status StatusOf(int answer) const { return DeviceTableStatus(answer, spec(), "rows of a batch"); }
  // Copies the ids of a message on the device to the host, which waits for the stream, and checks them.
  absl::Status Receive(const TableCall& call, const Message& message, NextBatch* batch) const;
  // Takes over the ids, and begins to send the rows of the next batch.
  absl::Status ReadAhead(const TableCall& call, NextBatch batch);
  // Whether gradients may train the active rows: all of them are still those of their lookup.
  bool IsTrainable() const { return trainable_ && !table_->IsStale(clock_); }
  // The active rows leave the device, so no gradient trains them.
  void LoseSums();
  // Brings all rows in host memory up to date.
  absl::Status TakeBack(const TableCall& call);
  // Forgets the rows of batches on the device; the pool stays.
  absl::Status DropBatches(const TableCall& call);
  // Takes the active rows back and drops them, if some of them may have left the table.
  absl::Status DropLeft(const TableCall& call);

  // Gives parcels memory for their records, until the next call.
  absl::Status MakeRoom(std::initializer_list<Parcel*> parcels) const;
  // Copies the records of a parcel's rows, in their present state. Several threads share the rows.
  void Pack(const ParallelFor& parallel_for, Parcel* parcel) const;
  // Counts the rows of a parcel, if the answer says that they are sent.
  absl::Status CountSent(int answer, const Parcel& parcel);
  // Writes rows, in the order of the device, to host memory that is older; read(&records) gives their records' address.
  template <typename Reader>
  absl::Status Write(const std::vector<SegmentId>& rows, const Reader& read, const TableCall& call);
  // Rows that wait since the last lookup.
  absl::Status WriteBack(const TableCall& call);
  // Rows of the batch under way, which also stay on the device.
  absl::Status TakeActiveBack(const TableCall& call);
  // Rows of the pool, at most so many at a time.
  absl::Status TakeHotBack(size_t most, const TableCall& call);

  FusedrecDeviceBuffer* const buffer_;
  std::mutex mutex_;
  HotRows hot_;
  std::vector<Traffic> traffic_;  // by segment
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
