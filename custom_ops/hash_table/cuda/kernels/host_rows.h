// A table on a GPU that is larger than the device: its rows are in host memory, those of two batches on the device.
//
// What there is, which rows are new and which leave, counts and clocks are those of a HashTable in host memory, with its
// options and its checkpoints. Rows are trained on the device, in the two buffers of NestPipe, section IV-B
// (buffer_cuda.h); this is what goes on between the two.
//
//   look-ahead of t + 1   rows of batch t - 1 go back; ids of t + 1 come to the host, which finds their rows and copies
//                         them to the device. Nothing changes by it.
//   lookup of t + 1       the host counts, inserts and evicts; what is new, or was changed by others since the look-ahead,
//                         is told to the device late; the buffers change roles, and the device looks up.
//   update of t + 1       on the device alone; the host only counts the version.
//
// Equal to a HashTable bit for bit: clock and version on the device are the host's. A lookup without a look-ahead has one
// of its own first, which nothing hides. There is one look-ahead at a time: of an earlier one the lookup begins anew.
//
// # Rows that leave while they are on the device
// A row of batch t may be evicted by the lookup of t + 1, not by any before (the window is one lookup). Its record comes
// back to nobody and is passed over. An id never leaves and comes back inside one lookup, so what the device refreshes for
// t + 1 is no row of before. All else that changes rows in host memory (imports, removals by hand) first takes back what
// is on the device, and drops it there: gradients that come then are refused, as in any table.
#ifndef FUSEDREC_HASH_TABLE_CUDA_KERNELS_HOST_ROWS_H_
#define FUSEDREC_HASH_TABLE_CUDA_KERNELS_HOST_ROWS_H_

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cuda/buffer_cuda.h"

namespace fusedrec {

class HostRows {
 public:
  // A message whose entries are on the device, and what the call runs on.
  struct Call {
    FusedrecMessage message;
    int64_t num_entries;
    const ParallelFor& parallel_for;
    void* stream;
  };
  enum class Access { kNumbers, kRows, kChange };  // of statistics; of rows; of what rows there are, or their values

  static absl::StatusOr<std::unique_ptr<HostRows>> Make(const TableSpec& spec, Optimizer optimizer,
                                                        const FusedrecAllocator& allocator, void* stream);
  ~HostRows() { fusedrec_buffer_destroy(buffer_); }
  HostRows(const HostRows&) = delete;
  HostRows& operator=(const HostRows&) = delete;

  // ticket: names this look-ahead to its lookup; never 0.
  absl::Status LookAhead(const Call& call, int64_t* ticket);
  // Arguments as in fusedrec_table_lookup; ticket 0: no look-ahead.
  absl::Status Lookup(const Call& call, int64_t ticket, int64_t storage, void* rows, int64_t out_rows, int32_t* inverse,
                      int64_t* handles, int64_t* num_rows);
  // rows [V, dim] of `storage`, in host memory.
  absl::Status Find(const Call& call, Storage storage, void* rows);
  absl::Status Prefetch(const Call& call);
  // Arguments as in fusedrec_table_apply.
  absl::Status Apply(const int64_t* handles, int64_t num_rows, const int32_t* inverse, int64_t num_ids,
                     const void* grads, int64_t storage, float scale, const FusedrecUpdate& update, int32_t* left_out,
                     int64_t* num_left_out, void* stream);
  // Calls `use` with the table in host memory, whose rows are what they must be for that.
  absl::Status OnHost(Access access, const ParallelFor& parallel_for, void* stream,
                      const std::function<absl::Status(HashTable*)>& use);

 private:
  // What a look-ahead has seen, and has told the device of.
  struct Seen {
    int64_t ticket = 0;  // 0: nothing
    std::vector<int64_t> entries;
    std::vector<int32_t> splits;
    std::vector<int64_t> handles;  // [V]
    int64_t version = 0, moves = 0;  // of the table then
    std::vector<int64_t> ids, segment_splits, order;  // by segment: ids, and which received one each is
    std::vector<SegmentId> told;  // rows that the device has, in their order there

    Message message() const { return {entries, splits, static_cast<int64_t>(handles.size())}; }
  };
  // Rows for the device, by segment.
  struct Parcel {
    std::vector<int64_t> ids, handles, splits;
    char* records = nullptr;  // of the buffer's host memory
  };

  HostRows(std::unique_ptr<HashTable> table, FusedrecDeviceBuffer* buffer) : table_(std::move(table)), buffer_(buffer) {}
  absl::Status StatusOf(int answer) const;
  absl::Status Receive(const Call& call, Seen* seen) const;
  absl::Status ReadAhead(const Call& call);
  // The received ids whose row is_wanted(v) names, kNoRow for none, with their records.
  template <typename RowWanted>
  absl::Status Pack(const ParallelFor& parallel_for, const RowWanted& row_wanted, Parcel* parcel);
  // Records of rows, which read(records) copies from the device, become those of host memory.
  template <typename Read>
  absl::Status WriteTrained(const std::vector<SegmentId>& rows, const Read& read, const ParallelFor& parallel_for);
  absl::Status WriteBack(const ParallelFor& parallel_for);
  absl::Status TakeBack(const ParallelFor& parallel_for, void* stream);

  const std::unique_ptr<HashTable> table_;
  FusedrecDeviceBuffer* const buffer_;
  std::mutex mutex_;  // one call at a time
  Seen seen_;
  int64_t tickets_ = 0;
  std::vector<SegmentId> active_, waiting_;  // rows on the device, and those that wait to go back, in their order there
  uint32_t clock_ = 0;       // of the lookup whose rows are active
  bool trainable_ = false;   // whether they are, as that lookup left them
  bool is_trained_ = false;  // whether they are newer than in host memory
};

}  // namespace fusedrec

#endif  // FUSEDREC_HASH_TABLE_CUDA_KERNELS_HOST_ROWS_H_
