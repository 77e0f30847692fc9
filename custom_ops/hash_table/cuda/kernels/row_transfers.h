// Rows on their way between a table in host memory and the buffers of its device (buffer_cuda.h): packed, sent, written
// back, and counted. HostRows decides which rows travel, and when.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "absl/status/status.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cuda/buffer/buffer_cuda.h"
#include "hash_table/cuda/kernels/hot_rows.h"

namespace fusedrec {

class RowTransfers {
 public:
  // Rows for the device, by segment.
  struct Parcel {
    std::vector<int64_t> ids, handles, splits{0};
    char* records = nullptr;  // in page-locked memory; Pack fills it

    void Add(int64_t id, int64_t handle) {
      ids.push_back(id);
      handles.push_back(handle);
    }
    void EndSegment() { splits.push_back(ids.size()); }
  };

  RowTransfers(HashTable* table, FusedrecDeviceBuffer* buffer)
      : table_(table), buffer_(buffer), traffic_(table->segments()) {}

  // The answer of a launcher of the buffer.
  absl::Status StatusOf(int answer) const;
  // Gives parcels memory for their records, until the next call.
  absl::Status MakeRoom(std::initializer_list<Parcel*> parcels) const;
  // Copies the records of a parcel's rows, in their present state. Several threads share the rows.
  void Pack(const ParallelFor& parallel_for, Parcel* parcel) const;
  // Begins to send rows of the next batch. hot: further ones, which lie in the pool.
  absl::Status Prefetch(const Parcel& parcel, const FusedrecHotRows& hot, void* stream);
  // Begins to send the other rows of the same batch.
  absl::Status PrefetchMore(const Parcel& parcel, void* stream);
  // Begins the next batch, and to copy the rows that leave. moves: null without a pool.
  absl::Status Advance(const Parcel& late, const FusedrecPoolMoves* moves, void* stream);

  // The following three write rows to host memory that is older than they are. `rows` are in the order of the device.
  // Rows that wait since the last Advance.
  absl::Status WriteBack(const std::vector<SegmentId>& rows, const ParallelFor& parallel_for);
  // Rows of the batch under way, which also stay on the device.
  absl::Status TakeActiveBack(const std::vector<SegmentId>& rows, const ParallelFor& parallel_for, void* stream);
  // Rows of the pool, at most so many at a time.
  absl::Status TakeHotBack(HotRows* hot, size_t most, const ParallelFor& parallel_for, void* stream);

  // Counts rows of a lookup that lay in the pool, by segment.
  void CountHits(const std::vector<int64_t>& splits);
  // By segment: rows of lookups that lay in the pool, bytes of records that went to the device, and bytes that came back.
  std::vector<int64_t> Traffic() const;

 private:
  struct RowTraffic {
    int64_t hits = 0, sent = 0, returned = 0;
  };

  // Writes the records of rows, of which read(&records) gives the address.
  template <typename Read>
  absl::Status Write(const std::vector<SegmentId>& rows, const Read& read, const ParallelFor& parallel_for);
  void CountSent(const Parcel& parcel);

  HashTable* const table_;
  FusedrecDeviceBuffer* const buffer_;
  std::vector<RowTraffic> traffic_;  // by segment, in rows
};

}  // namespace fusedrec
