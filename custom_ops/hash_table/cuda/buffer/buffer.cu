#include "hash_table/cuda/buffer/buffer.h"

#include <algorithm>

#include "hash_table/cuda/buffer/buffer.cuh"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

#define FUSEDREC_CUDA(call) FUSEDREC_RETURN_IF_CUDA_ERROR(static_cast<int>(call))

int FusedrecDeviceTable::RefreshFrom(const FusedrecDeviceTable& newer, unsigned long long* shared, void* stream) {
  std::scoped_lock lock(mutex_, newer.mutex_);
  if (rows_.next == 0 || newer.rows_.next == 0) return kCudaSuccess;
  const Memory memory(allocator_, rows_.next * sizeof(uint32_t));
  if (memory.data() == nullptr) return kDeviceOutOfMemory;
  uint32_t* const newer_row = reinterpret_cast<uint32_t*>(memory.data());
  FUSEDREC_LAUNCH(IntersectKernel, BlocksFor(rows_.next, kBufferThreads), kBufferThreads, 0, stream, View(), rows_.next,
                  newer.View(), newer_row, shared);
  FUSEDREC_LAUNCH(RefreshKernel, BlocksFor(32 * rows_.next, kBufferThreads), kBufferThreads, 0, stream, View(),
                  rows_.next, newer.View(), newer_row);
  return LastError();
}

int FusedrecDeviceBuffer::Make(const FusedrecTableTexts& texts, const FusedrecAllocator& allocator,
                               FusedrecDeviceBuffer** made, void* stream) {
  *made = nullptr;
  TableSpec spec;
  if (!FusedrecDeviceTable::Read(texts, &spec) || !spec.host_rows) return kCudaInvalidValue;
  // Host memory decides which rows exist, and knows the rows that left.
  const int64_t hot_rows = spec.hot_rows;
  spec.limits.assign(spec.limits.size(), Limits());
  spec.record_tombstones = false;
  std::unique_ptr<FusedrecDeviceBuffer> buffer(new FusedrecDeviceBuffer(allocator, hot_rows));
  for (std::unique_ptr<FusedrecDeviceTable>& table : buffer->tables_) {
    FusedrecDeviceTable* half;
    FUSEDREC_RETURN_IF_CUDA_ERROR(FusedrecDeviceTable::Make(spec, texts.chunk_rows, allocator, &half, stream));
    table.reset(half);
    table->RefuseNewRows();
  }
  if (hot_rows > 0) {
    buffer->pool_ = Memory(allocator, hot_rows * buffer->record_bytes());
    if (buffer->pool_.data() == nullptr) return kDeviceOutOfMemory;
  }
  for (cudaStream_t* copies : {&buffer->to_device_, &buffer->to_host_}) {
    FUSEDREC_CUDA(cudaStreamCreateWithFlags(copies, cudaStreamNonBlocking));
  }
  for (cudaEvent_t* event : {&buffer->arrived_, &buffer->vacated_, &buffer->gathered_}) {
    FUSEDREC_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  *made = buffer.release();
  return kCudaSuccess;
}

FusedrecDeviceBuffer::~FusedrecDeviceBuffer() {
  for (cudaStream_t copies : {to_device_, to_host_}) {
    if (copies == nullptr) continue;
    cudaStreamSynchronize(copies);  // they use memory that goes
    cudaStreamDestroy(copies);
  }
  for (cudaEvent_t event : {arrived_, vacated_, gathered_}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

int FusedrecDeviceBuffer::Insert(const Arrived& arrived, void* stream) {
  if (arrived.count == 0) return kCudaSuccess;
  const int answer = other()->WriteRecords(arrived.counts, arrived.ids, arrived.records, stream);
  return answer == kDeviceDoubled ? kCudaInvalidValue : answer;
}

int FusedrecDeviceBuffer::Begin(const Arrived& late, const FusedrecPoolMoves* moves, unsigned long long* shared,
                                void* stream) {
  FUSEDREC_RETURN_IF_CUDA_ERROR(MakeRoomToReturn(LeavingOf(moves)));
  const int64_t count = moves == nullptr ? 0 : moves->leaving + 2 * moves->kept + moves->dropped;
  const Memory memory = count > 0 ? Memory(allocator_, count * sizeof(int64_t)) : Memory();
  if (count > 0 && memory.data() == nullptr) return kDeviceOutOfMemory;
  auto* const numbers = reinterpret_cast<int64_t*>(memory.data());
  if (count > 0) FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(numbers, moves->numbers, count, stream));
  FUSEDREC_CUDA(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), arrived_, 0));
  FUSEDREC_RETURN_IF_CUDA_ERROR(other()->Forget(stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Insert(prefetched_, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Insert(more_, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopySlots(hot_.slots, hot_.count, hot_.records, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Insert(hot_, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Insert(late, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(other()->RefreshFrom(*active(), shared, stream));
  // The pool changes last: nothing below needs memory.
  FUSEDREC_RETURN_IF_CUDA_ERROR(moves == nullptr ? active()->ReadRecordsOf(nullptr, nullptr, active()->num_rows(),
                                                                           out_.data(), stream)
                                                 : Move(*moves, numbers, stream));
  return CopyOut(LeavingOf(moves), stream);
}

int fusedrec_buffer_advance(FusedrecDeviceBuffer* buffer, const int64_t* late_ids, const int64_t* late_splits,
                            const char* late_records, const FusedrecPoolMoves* moves, int64_t* shared, void* stream) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  if (buffer->waiting_ > 0) return kDeviceNotWritten;
  const int64_t segments = buffer->tables_[0]->segments(), count = late_splits == nullptr ? 0 : late_splits[segments];
  if (late_splits != nullptr && !SplitsAreSound(late_splits, segments, count)) return kCudaInvalidValue;
  if (moves != nullptr && !buffer->AreSound(*moves)) return kCudaInvalidValue;
  // On the caller's stream, as all users of this memory before and after.
  const Memory counter(buffer->allocator_, sizeof(unsigned long long));
  Memory memory;
  bool grown;
  if (counter.data() == nullptr) return kDeviceOutOfMemory;
  FusedrecDeviceBuffer::Arrived late;
  if (count > 0) {
    Carver needed(nullptr);
    buffer->Take(&needed, late_splits, false);
    FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->MakeRoom(needed.bytes(), &memory, &grown));
    Carver carver(memory.data());
    late = buffer->Take(&carver, late_splits, false);
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(late.ids, late_ids, count, stream));
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(late.records, late_records, count * buffer->record_bytes(), stream));
  }
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(counter.data(), 0, sizeof(unsigned long long), stream));
  auto* const device_shared = reinterpret_cast<unsigned long long*>(counter.data());
  const int answer = buffer->Begin(late, moves, device_shared, stream);
  buffer->ForgetPrefetched();
  if (answer != kCudaSuccess) {
    FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->other()->Forget(stream));
    // Late records may be under way from memory that the next call of host_memory gives out, and rows of slots into memory
    // that the next prefetch fills.
    FUSEDREC_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
    return answer;
  }
  // Lookups and updates go on counting, because their clock must be ahead of the clocks in all rows.
  std::vector<int64_t> sizes(segments);
  const FusedrecTableTotals totals = buffer->active()->Size(sizes.data()), next = buffer->other()->Size(sizes.data());
  buffer->other()->SetClock(std::max(totals.clock, next.clock), totals.version);
  buffer->waiting_ = buffer->LeavingOf(moves);
  buffer->active_ = 1 - buffer->active_;
  if (shared == nullptr) return kCudaSuccess;
  return CopyToHost(shared, reinterpret_cast<const int64_t*>(device_shared), 1, stream);
}

int fusedrec_buffer_drop(FusedrecDeviceBuffer* buffer, void* stream) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  // Their copies are under way in memory that later calls replace.
  for (cudaStream_t copies : {buffer->to_device_, buffer->to_host_}) FUSEDREC_CUDA(cudaStreamSynchronize(copies));
  buffer->ForgetPrefetched();
  buffer->waiting_ = 0;
  FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->active()->Forget(stream));
  return buffer->other()->Forget(stream);
}

void fusedrec_buffer_rows(FusedrecDeviceBuffer* buffer, int64_t* rows) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  rows[0] = buffer->active()->num_rows();
  rows[1] = buffer->waiting_;
  rows[2] = buffer->prefetched_.count + buffer->more_.count + buffer->hot_.count;
}

int fusedrec_buffer_create(const FusedrecTableTexts* texts, const FusedrecAllocator* allocator,
                           FusedrecDeviceBuffer** buffer, void* stream) {
  return FusedrecDeviceBuffer::Make(*texts, *allocator, buffer, stream);
}

void fusedrec_buffer_destroy(FusedrecDeviceBuffer* buffer) { delete buffer; }

FusedrecDeviceTable* fusedrec_buffer_active(FusedrecDeviceBuffer* buffer) { return buffer->active(); }

void fusedrec_buffer_set_version(FusedrecDeviceBuffer* buffer, int64_t version) {
  buffer->active()->SetVersion(version);
}
