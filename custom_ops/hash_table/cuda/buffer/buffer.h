// The two buffers, their roles, and the pool (pool.cu); buffer_cuda.h explains them.
#ifndef FUSEDREC_HASH_TABLE_CUDA_BUFFER_BUFFER_H_
#define FUSEDREC_HASH_TABLE_CUDA_BUFFER_BUFFER_H_

#include <memory>
#include <mutex>
#include <vector>

#include "hash_table/cuda/buffer/buffer_cuda.h"
#include "hash_table/cuda/table.h"

struct FusedrecDeviceBuffer {
 public:
  using Memory = fusedrec::device_table::Memory;

  static int Make(const FusedrecTableSpec& spec, const FusedrecAllocator& allocator, int64_t hot_rows,
                  FusedrecDeviceBuffer** made, void* stream);
  ~FusedrecDeviceBuffer();
  int HostMemory(int64_t bytes, char** memory);
  int Prefetch(const int64_t* ids, const int64_t* segment_splits, const char* records, const FusedrecHotRows& hot,
               void* stream);
  int Advance(const int64_t* late_ids, const int64_t* late_splits, const char* late_records,
              const FusedrecPoolMoves* moves, int64_t* shared, void* stream);
  int WriteBack(char* records);
  int ReadActive(char* records, void* stream);
  int ReadHot(const int64_t* slots, int64_t count, char* records, void* stream);
  int Drop(void* stream);
  void Rows(int64_t* rows) const;
  FusedrecDeviceTable* active() const { return tables_[active_].get(); }

 private:
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
  int CopyOut(char* records);

  const FusedrecAllocator allocator_;
  mutable std::mutex mutex_;
  std::unique_ptr<FusedrecDeviceTable> tables_[2];
  int active_ = 0;
  Memory in_, out_;  // of arriving and leaving rows; kept, so that the stream of copies never waits for an earlier user
  const int64_t hot_rows_;
  Memory pool_;  // [hot_rows, record_bytes]
  Arrived prefetched_, hot_;
  int64_t waiting_ = 0;  // rows in `out_`
  char* pinned_ = nullptr;
  int64_t pinned_bytes_ = 0;
  cudaStream_t copies_ = nullptr;
  // On the caller's stream: new memory of `in_` has no other user, `out_` is filled.
  cudaEvent_t vacated_ = nullptr, gathered_ = nullptr;
};

#endif  // FUSEDREC_HASH_TABLE_CUDA_BUFFER_BUFFER_H_
