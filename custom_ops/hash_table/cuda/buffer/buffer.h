// The two buffers, their roles, and the pool (pool.cu); buffer_cuda.h explains them.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "hash_table/cuda/buffer/buffer_cuda.h"
#include "hash_table/cuda/table_memory.h"

namespace fusedrec {
namespace device_table {

// Page-locked host memory, which copies between host and device need not stage.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  ~PinnedMemory() {
    if (data_ != nullptr) cudaFreeHost(data_);
  }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  char* data() const { return data_; }
  // Makes it at least so large; its contents are then lost. The caller has waited for all copies.
  int Reserve(int64_t bytes) {
    if (bytes <= bytes_) return kCudaSuccess;
    const int64_t size = bytes + bytes / 4;  // batches differ a little
    void* larger = nullptr;
    const int answer = static_cast<int>(cudaMallocHost(&larger, size));
    if (answer != kCudaSuccess) {
      LastError();  // the next launch would answer it, too
      return answer;
    }
    if (data_ != nullptr) cudaFreeHost(data_);
    data_ = static_cast<char*>(larger);
    bytes_ = size;
    return kCudaSuccess;
  }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace device_table
}  // namespace fusedrec

struct FusedrecDeviceBuffer {
  using Memory = fusedrec::device_table::Memory;

  static int Make(const FusedrecTableTexts& texts, const FusedrecAllocator& allocator, FusedrecDeviceBuffer** made,
                  void* stream);
  ~FusedrecDeviceBuffer();
  FusedrecDeviceTable* active() const { return tables_[active_].get(); }

  // Records that were copied from host memory, or are read from slots, and their ids.
  struct Arrived {
    std::vector<int64_t> counts;  // by segment; empty: there are none
    int64_t* ids = nullptr;
    char* records = nullptr;
    int64_t* slots = nullptr;  // of hot rows
    int64_t count = 0;
  };

  FusedrecDeviceBuffer(const FusedrecAllocator& allocator, int64_t hot_rows)
      : allocator_(allocator), hot_rows_(hot_rows) {}
  FusedrecDeviceTable* other() const { return tables_[1 - active_].get(); }
  int64_t record_bytes() const { return tables_[0]->record_bytes(); }
  // Replaces the memory by one of these bytes, unless it is large enough.
  int MakeRoom(int64_t bytes, Memory* memory, bool* grown) const;
  // Takes room for ids and records, of hot rows for slots, too.
  Arrived Take(fusedrec::Carver* carver, const int64_t* segment_splits, bool is_hot) const;
  // Memory of arriving rows, of these bytes, in which copies may begin.
  int MakeRoomToSend(int64_t bytes, Memory* memory, void* stream);
  int Send(const Arrived& arrived, const int64_t* ids, const char* records);
  void ForgetPrefetched() { prefetched_ = more_ = hot_ = Arrived(); }
  int Insert(const Arrived& arrived, void* stream);
  int Begin(const Arrived& late, const FusedrecPoolMoves* moves, unsigned long long* shared, void* stream);
  int64_t LeavingOf(const FusedrecPoolMoves* moves) const {
    return moves == nullptr ? active()->num_rows() : moves->leaving + moves->dropped;
  }
  bool AreSlots(const int64_t* slots, int64_t count) const;
  bool AreSound(const FusedrecPoolMoves& moves) const;
  // Copies the records of slots (device).
  int CopySlots(const int64_t* slots, int64_t count, char* records, void* stream) const;
  // Copies the records that leave to `out_`, and rows of the active buffer to their slots. numbers: device.
  int Move(const FusedrecPoolMoves& moves, const int64_t* numbers, void* stream);
  // Memory for the records of so many leaving rows, on the device and the host.
  int MakeRoomToReturn(int64_t rows);
  // Begins the copy of these rows in `out_` to the host, behind the work on `stream`.
  int CopyOut(int64_t rows, void* stream);
  // Waits for that copy.
  int Returned(const char** records);

  const FusedrecAllocator allocator_;
  mutable std::mutex mutex_;
  std::unique_ptr<FusedrecDeviceTable> tables_[2];
  int active_ = 0;
  // Memory of arriving rows, of further ones and of leaving rows. It is kept, so copies never wait for an earlier user.
  Memory in_, in_more_, out_;
  const int64_t hot_rows_;
  Memory pool_;  // [hot_rows, record_bytes]
  Arrived prefetched_, more_, hot_;
  int64_t waiting_ = 0;  // rows in `out_` that write_back has not returned
  fusedrec::device_table::PinnedMemory sent_, returned_;  // records on their way to the device, and to the host
  cudaStream_t to_device_ = nullptr, to_host_ = nullptr;
  cudaEvent_t arrived_ = nullptr;  // on to_device_: the rows of the next batch are on the device
  // On the caller's stream: new memory of rows that arrive has no other user, out_ is filled.
  cudaEvent_t vacated_ = nullptr, gathered_ = nullptr;
};
