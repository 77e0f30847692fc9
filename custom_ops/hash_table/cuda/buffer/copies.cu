// Copies of rows between host and device, on streams of their own; buffer_cuda.h explains them.
#include <utility>

#include "hash_table/cuda/buffer/buffer.h"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

#define FUSEDREC_CUDA(call) FUSEDREC_RETURN_IF_CUDA_ERROR(static_cast<int>(call))

int FusedrecDeviceBuffer::HostMemory(int64_t bytes, char** memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  FUSEDREC_CUDA(cudaStreamSynchronize(to_device_));
  FUSEDREC_RETURN_IF_CUDA_ERROR(sent_.Reserve(bytes));
  *memory = sent_.data();
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

int FusedrecDeviceBuffer::Prefetch(const int64_t* ids, const int64_t* segment_splits, const char* records,
                                   const FusedrecHotRows& hot, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t segments = tables_[0]->segments(), count = segment_splits[segments];
  const int64_t hot_count = hot.segment_splits[segments];
  if (!SplitsAreSound(segment_splits, segments, count) || count + hot_count > kDeviceTableMaxIds) return kCudaInvalidValue;
  if (!SplitsAreSound(hot.segment_splits, segments, hot_count) || !AreSlots(hot.slots, hot_count)) return kCudaInvalidValue;
  // Copies of rows that this call replaces may be under way to memory that it replaces.
  FUSEDREC_CUDA(cudaStreamSynchronize(to_device_));
  Arrived arrived, hot_arrived;
  const auto carve = [&](char* memory) {
    Carver carver(memory);
    arrived = Take(&carver, segment_splits, false);
    hot_arrived = Take(&carver, hot.segment_splits, true);
    return carver.bytes();
  };
  FUSEDREC_RETURN_IF_CUDA_ERROR(MakeRoomToSend(carve(nullptr), &in_, stream));
  ForgetPrefetched();
  carve(in_.data());
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(hot_arrived.ids, hot.ids, hot_count, to_device_));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(hot_arrived.slots, hot.slots, hot_count, to_device_));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Send(arrived, ids, records));
  prefetched_ = arrived;
  hot_ = hot_arrived;
  return kCudaSuccess;
}

int FusedrecDeviceBuffer::PrefetchMore(const int64_t* ids, const int64_t* segment_splits, const char* records,
                                       void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t segments = tables_[0]->segments(), count = segment_splits[segments];
  if (!SplitsAreSound(segment_splits, segments, count) || count > kDeviceTableMaxIds) return kCudaInvalidValue;
  Carver needed(nullptr);
  Take(&needed, segment_splits, false);
  FUSEDREC_RETURN_IF_CUDA_ERROR(MakeRoomToSend(needed.bytes(), &in_more_, stream));
  Carver carver(in_more_.data());
  const Arrived arrived = Take(&carver, segment_splits, false);
  FUSEDREC_RETURN_IF_CUDA_ERROR(Send(arrived, ids, records));
  more_ = arrived;
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

int FusedrecDeviceBuffer::WriteBack(const char** records) {
  std::lock_guard<std::mutex> lock(mutex_);
  FUSEDREC_RETURN_IF_CUDA_ERROR(Returned(records));
  waiting_ = 0;
  return kCudaSuccess;
}

int FusedrecDeviceBuffer::ReadActive(const char** records, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (waiting_ > 0) return kDeviceNotWritten;
  const int64_t rows = active()->num_rows();
  FUSEDREC_RETURN_IF_CUDA_ERROR(MakeRoomToReturn(rows));
  FUSEDREC_RETURN_IF_CUDA_ERROR(active()->ReadRecordsOf(nullptr, nullptr, rows, out_.data(), stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyOut(rows, stream));
  return Returned(records);
}
