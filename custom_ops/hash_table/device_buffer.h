// The two buffers and their roles; device_buffer_cuda.h says what they are for.
#ifndef FUSEDREC_HASH_TABLE_DEVICE_BUFFER_H_
#define FUSEDREC_HASH_TABLE_DEVICE_BUFFER_H_

#include <memory>
#include <mutex>

#include "hash_table/device_buffer_cuda.h"
#include "hash_table/device_table.h"

struct FusedrecDeviceBuffer {
 public:
  static int Make(FusedrecTableSpec spec, int64_t capacity, const FusedrecAllocator& allocator,
                  FusedrecDeviceBuffer** made, void* stream);
  int Prefetch(const int64_t* ids, const int64_t* segment_splits, const char* records, void* stream);
  int Advance(int64_t* shared, void* stream);
  int WriteBack(char* records, void* stream);
  void Rows(int64_t* rows) const;
  FusedrecDeviceTable* active() const { return tables_[active_].get(); }

 private:
  FusedrecDeviceBuffer(int64_t capacity, const FusedrecAllocator& allocator)
      : capacity_(capacity), allocator_(allocator) {}
  FusedrecDeviceTable* other() const { return tables_[1 - active_].get(); }

  const int64_t capacity_;
  const FusedrecAllocator allocator_;
  mutable std::mutex mutex_;
  std::unique_ptr<FusedrecDeviceTable> tables_[2];
  int active_ = 0;
  bool is_trained_ = false;  // whether rows of the other buffer were trained and have not been written back
};

#endif  // FUSEDREC_HASH_TABLE_DEVICE_BUFFER_H_
