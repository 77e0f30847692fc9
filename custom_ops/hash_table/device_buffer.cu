#include "hash_table/device_buffer.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "hash_table/device_buffer.cuh"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

int FusedrecDeviceTable::RefreshFrom(const FusedrecDeviceTable& newer, unsigned long long* shared, void* stream) {
  std::scoped_lock lock(mutex_, newer.mutex_);
  if (next_row_ == 0 || newer.next_row_ == 0) return kCudaSuccess;
  const Memory memory(allocator_, next_row_ * sizeof(uint32_t));
  if (memory.data() == nullptr) return kDeviceOutOfMemory;
  uint32_t* const newer_row = reinterpret_cast<uint32_t*>(memory.data());
  FUSEDREC_LAUNCH(IntersectKernel, BlocksFor(next_row_, kBufferThreads), kBufferThreads, 0, stream, View(), next_row_,
                  newer.View(), newer_row, shared);
  FUSEDREC_LAUNCH(RefreshKernel, BlocksFor(32 * next_row_, kBufferThreads), kBufferThreads, 0, stream, View(),
                  next_row_, newer.View(), newer_row);
  return LastError();
}

int FusedrecDeviceBuffer::Make(FusedrecTableSpec spec, int64_t capacity, const FusedrecAllocator& allocator,
                               FusedrecDeviceBuffer** made, void* stream) {
  *made = nullptr;
  if (capacity < 1 || capacity > kDeviceTableMaxIds || spec.max_rows != 0 || spec.eviction != 0 || spec.ttl != 0) {
    return kCudaInvalidValue;
  }
  std::unique_ptr<FusedrecDeviceBuffer> buffer(new FusedrecDeviceBuffer(capacity, allocator));
  for (std::unique_ptr<FusedrecDeviceTable>& table : buffer->tables_) {
    FusedrecDeviceTable* half;
    FUSEDREC_RETURN_IF_CUDA_ERROR(FusedrecDeviceTable::Make(spec, allocator, &half, stream));
    table.reset(half);
    table->RefuseNewRows();
    FUSEDREC_RETURN_IF_CUDA_ERROR(table->Reserve(capacity, stream));
  }
  *made = buffer.release();
  return kCudaSuccess;
}

int FusedrecDeviceBuffer::Prefetch(const int64_t* ids, const int64_t* segment_splits, const char* records,
                                   void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t segments = other()->segments(), count = segment_splits[segments];
  if (!SplitsAreSound(segment_splits, segments, count)) return kCudaInvalidValue;
  if (is_trained_) return kDeviceNotWritten;
  if (count > capacity_) return kDeviceTableFull;
  FUSEDREC_RETURN_IF_CUDA_ERROR(other()->Forget(stream));
  if (count == 0) return kCudaSuccess;
  const int64_t bytes = count * other()->record_bytes();
  int64_t* device_ids = nullptr;
  char* device_records = nullptr;
  const auto carve = [&](void* memory) {
    Carver carver(memory);
    device_ids = carver.Take<int64_t>(count);
    device_records = carver.Take<char>(bytes);
    return carver.bytes();
  };
  const Memory memory(allocator_, carve(nullptr));
  if (memory.data() == nullptr) return kDeviceOutOfMemory;
  carve(memory.data());
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(device_ids, ids, count, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(device_records, records, bytes, stream));
  std::vector<int64_t> counts(segments);
  for (int64_t s = 0; s < segments; ++s) counts[s] = segment_splits[s + 1] - segment_splits[s];
  int64_t written;
  const int answer = other()->WriteRecords(counts, device_ids, device_records, &written, stream);
  if (answer == kCudaSuccess && written == count) return kCudaSuccess;
  FUSEDREC_RETURN_IF_CUDA_ERROR(other()->Forget(stream));
  return answer == kCudaSuccess ? kCudaInvalidValue : answer;
}

int FusedrecDeviceBuffer::Advance(int64_t* shared, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_trained_) return kDeviceNotWritten;
  const Memory counter(allocator_, sizeof(unsigned long long));
  if (counter.data() == nullptr) return kDeviceOutOfMemory;
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(counter.data(), 0, sizeof(unsigned long long), stream));
  auto* const device_shared = reinterpret_cast<unsigned long long*>(counter.data());
  FUSEDREC_RETURN_IF_CUDA_ERROR(other()->RefreshFrom(*active(), device_shared, stream));
  // Lookups and updates go on counting where they were, ahead of all that rows were touched at.
  std::vector<int64_t> sizes(active()->segments());
  int64_t about[4], next[4];
  active()->Size(sizes.data(), about);
  other()->Size(sizes.data(), next);
  other()->SetClock(std::max(about[0], next[0]), about[1]);
  is_trained_ = active()->num_rows() > 0;
  active_ = 1 - active_;
  if (shared == nullptr) return kCudaSuccess;
  return CopyToHost(shared, reinterpret_cast<const int64_t*>(device_shared), 1, stream);
}

int FusedrecDeviceBuffer::WriteBack(char* records, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t rows = is_trained_ ? other()->num_rows() : 0;
  if (rows > 0) {
    // Rows are numbered as their ids were told.
    std::vector<int64_t> handles(rows);
    std::iota(handles.begin(), handles.end(), int64_t{0});
    const int64_t bytes = rows * other()->record_bytes();
    int64_t* device_handles = nullptr;
    char* device_records = nullptr;
    const auto carve = [&](void* memory) {
      Carver carver(memory);
      device_handles = carver.Take<int64_t>(rows);
      device_records = carver.Take<char>(bytes);
      return carver.bytes();
    };
    const Memory memory(allocator_, carve(nullptr));
    if (memory.data() == nullptr) return kDeviceOutOfMemory;
    carve(memory.data());
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(device_handles, handles.data(), rows, stream));
    FUSEDREC_RETURN_IF_CUDA_ERROR(other()->ReadRecords(device_handles, rows, device_records, stream));
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(records, device_records, bytes, stream));
    FUSEDREC_RETURN_IF_CUDA_ERROR(other()->Forget(stream));
  }
  is_trained_ = false;
  return kCudaSuccess;
}

void FusedrecDeviceBuffer::Rows(int64_t* rows) const {
  std::lock_guard<std::mutex> lock(mutex_);
  rows[0] = active()->num_rows();
  rows[1] = is_trained_ ? other()->num_rows() : 0;
  rows[2] = is_trained_ ? 0 : other()->num_rows();
}

int fusedrec_buffer_create(const FusedrecTableSpec* spec, int64_t capacity, const FusedrecAllocator* allocator,
                           FusedrecDeviceBuffer** buffer, void* stream) {
  return FusedrecDeviceBuffer::Make(*spec, capacity, *allocator, buffer, stream);
}

void fusedrec_buffer_destroy(FusedrecDeviceBuffer* buffer) { delete buffer; }

FusedrecDeviceTable* fusedrec_buffer_active(FusedrecDeviceBuffer* buffer) { return buffer->active(); }

int fusedrec_buffer_prefetch(FusedrecDeviceBuffer* buffer, const int64_t* ids, const int64_t* segment_splits,
                             const char* records, void* stream) {
  return buffer->Prefetch(ids, segment_splits, records, stream);
}

int fusedrec_buffer_advance(FusedrecDeviceBuffer* buffer, int64_t* shared, void* stream) {
  return buffer->Advance(shared, stream);
}

int fusedrec_buffer_write_back(FusedrecDeviceBuffer* buffer, char* records, void* stream) {
  return buffer->WriteBack(records, stream);
}

void fusedrec_buffer_rows(FusedrecDeviceBuffer* buffer, int64_t* rows) { buffer->Rows(rows); }
