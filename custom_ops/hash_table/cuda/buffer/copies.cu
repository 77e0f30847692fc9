// Copies of rows between host and device, on streams of their own; buffer_cuda.h explains them.
#include <utility>

#include "hash_table/cuda/buffer/buffer.h"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

#define FUSEDREC_CUDA(call) FUSEDREC_RETURN_IF_CUDA_ERROR(static_cast<int>(call))

int fusedrec_buffer_host_memory(FusedrecDeviceBuffer* buffer, int64_t bytes, char** memory) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  FUSEDREC_CUDA(cudaStreamSynchronize(buffer->to_device_));
  FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->sent_.Reserve(bytes));
  *memory = buffer->sent_.data();
  return kCudaSuccess;
}

FusedrecDeviceBuffer::Arrived FusedrecDeviceBuffer::Take(Carver* carver, const int64_t* segment_splits,
                                                         bool is_hot) const {
  const int64_t segments = tables_[0]->segments();
  Arrived arrived;
  for (int64_t s = 0; s < segments; ++s) arrived.counts.push_back(segment_splits[s + 1] - segment_splits[s]);
  arrived.count = segment_splits[segments];
  arrived.ids = carver->Take<int64_t>(arrived.count);
  arrived.records = carver->Take<char>(arrived.count * record_bytes());
  if (is_hot) arrived.slots = carver->Take<int64_t>(arrived.count);
  return arrived;
}

int FusedrecDeviceBuffer::MakeRoom(int64_t bytes, Memory* memory, bool* grown) const {
  *grown = bytes > memory->bytes();
  if (!*grown) return kCudaSuccess;
  Memory larger(allocator_, bytes + bytes / 4);
  if (larger.data() == nullptr) return kDeviceOutOfMemory;
  *memory = std::move(larger);
  return kCudaSuccess;
}

int FusedrecDeviceBuffer::MakeRoomToSend(int64_t bytes, Memory* memory, void* stream) {
  bool grown;
  FUSEDREC_RETURN_IF_CUDA_ERROR(MakeRoom(bytes, memory, &grown));
  if (!grown) return kCudaSuccess;  // it is free, because an advance waits until its rows have been read
  // The previous owner of new memory may still use it on the caller's stream.
  FUSEDREC_CUDA(cudaEventRecord(vacated_, static_cast<cudaStream_t>(stream)));
  FUSEDREC_CUDA(cudaStreamWaitEvent(to_device_, vacated_, 0));
  return kCudaSuccess;
}

int FusedrecDeviceBuffer::Send(const Arrived& arrived, const int64_t* ids, const char* records) {
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(arrived.ids, ids, arrived.count, to_device_));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(arrived.records, records, arrived.count * record_bytes(), to_device_));
  FUSEDREC_CUDA(cudaEventRecord(arrived_, to_device_));
  return kCudaSuccess;
}

int fusedrec_buffer_prefetch(FusedrecDeviceBuffer* buffer, const int64_t* ids, const int64_t* segment_splits,
                             const char* records, const FusedrecHotRows* hot_rows, void* stream) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  const int64_t segments = buffer->tables_[0]->segments(), count = segment_splits[segments];
  const std::vector<int64_t> none(segments + 1, 0);
  const FusedrecHotRows hot = hot_rows == nullptr ? FusedrecHotRows{nullptr, none.data(), nullptr} : *hot_rows;
  const int64_t hot_count = hot.segment_splits[segments];
  if (!SplitsAreSound(segment_splits, segments, count) || count + hot_count > kDeviceTableMaxIds) return kCudaInvalidValue;
  if (!SplitsAreSound(hot.segment_splits, segments, hot_count)) return kCudaInvalidValue;
  if (!buffer->AreSlots(hot.slots, hot_count)) return kCudaInvalidValue;
  // Copies of rows that this call replaces may be under way to memory that it replaces.
  FUSEDREC_CUDA(cudaStreamSynchronize(buffer->to_device_));
  FusedrecDeviceBuffer::Arrived arrived, hot_arrived;
  const auto carve = [&](char* memory) {
    Carver carver(memory);
    arrived = buffer->Take(&carver, segment_splits, false);
    hot_arrived = buffer->Take(&carver, hot.segment_splits, true);
    return carver.bytes();
  };
  FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->MakeRoomToSend(carve(nullptr), &buffer->in_, stream));
  buffer->ForgetPrefetched();
  carve(buffer->in_.data());
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(hot_arrived.ids, hot.ids, hot_count, buffer->to_device_));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(hot_arrived.slots, hot.slots, hot_count, buffer->to_device_));
  FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->Send(arrived, ids, records));
  buffer->prefetched_ = arrived;
  buffer->hot_ = hot_arrived;
  return kCudaSuccess;
}

int fusedrec_buffer_prefetch_more(FusedrecDeviceBuffer* buffer, const int64_t* ids, const int64_t* segment_splits,
                                  const char* records, void* stream) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  const int64_t segments = buffer->tables_[0]->segments(), count = segment_splits[segments];
  if (!SplitsAreSound(segment_splits, segments, count) || count > kDeviceTableMaxIds) return kCudaInvalidValue;
  Carver needed(nullptr);
  buffer->Take(&needed, segment_splits, false);
  FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->MakeRoomToSend(needed.bytes(), &buffer->in_more_, stream));
  Carver carver(buffer->in_more_.data());
  const FusedrecDeviceBuffer::Arrived arrived = buffer->Take(&carver, segment_splits, false);
  FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->Send(arrived, ids, records));
  buffer->more_ = arrived;
  return kCudaSuccess;
}

int FusedrecDeviceBuffer::MakeRoomToReturn(int64_t rows) {
  bool grown;
  FUSEDREC_RETURN_IF_CUDA_ERROR(returned_.Reserve(rows * record_bytes()));
  return MakeRoom(rows * record_bytes(), &out_, &grown);
}

int FusedrecDeviceBuffer::CopyOut(int64_t rows, void* stream) {
  FUSEDREC_CUDA(cudaEventRecord(gathered_, static_cast<cudaStream_t>(stream)));
  FUSEDREC_CUDA(cudaStreamWaitEvent(to_host_, gathered_, 0));
  if (rows == 0) return kCudaSuccess;
  FUSEDREC_CUDA(cudaMemcpyAsync(returned_.data(), out_.data(), rows * record_bytes(), cudaMemcpyDeviceToHost, to_host_));
  return kCudaSuccess;
}

int FusedrecDeviceBuffer::Returned(const char** records) {
  FUSEDREC_CUDA(cudaStreamSynchronize(to_host_));
  *records = returned_.data();
  return kCudaSuccess;
}

int fusedrec_buffer_write_back(FusedrecDeviceBuffer* buffer, const char** records) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->Returned(records));
  buffer->waiting_ = 0;
  return kCudaSuccess;
}

int fusedrec_buffer_read_active(FusedrecDeviceBuffer* buffer, const char** records, void* stream) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  if (buffer->waiting_ > 0) return kDeviceNotWritten;
  const int64_t rows = buffer->active()->num_rows();
  FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->MakeRoomToReturn(rows));
  FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->active()->ReadRecordsOf(nullptr, nullptr, rows, buffer->out_.data(), stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->CopyOut(rows, stream));
  return buffer->Returned(records);
}
