// The pool of hot rows; buffer_cuda.h explains it.
#include <algorithm>

#include "hash_table/cuda/buffer/buffer.h"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

namespace {

constexpr int kPoolThreads = 256;

// A warp per record, which begins at any even address (rows.cuh): records[n] = pool[slots[n]].
__global__ void __launch_bounds__(kPoolThreads)
    CopyRecordsKernel(const char* __restrict__ pool, const int64_t* __restrict__ slots, int64_t count, int64_t record_bytes,
                      char* __restrict__ records) {
  const int64_t n = GlobalThread() / 32;
  if (n >= count) return;
  const uint16_t* const from = reinterpret_cast<const uint16_t*>(pool + slots[n] * record_bytes);
  uint16_t* const to = reinterpret_cast<uint16_t*>(records + n * record_bytes);
  for (int64_t i = Lane(); i < record_bytes / 2; i += 32) to[i] = from[i];
}

bool AreBelow(const int64_t* numbers, int64_t count, int64_t limit) {
  return std::all_of(numbers, numbers + count, [=](int64_t number) { return number >= 0 && number < limit; });
}

}  // namespace

bool FusedrecDeviceBuffer::AreSlots(const int64_t* slots, int64_t count) const {
  return AreBelow(slots, count, hot_rows_);
}

bool FusedrecDeviceBuffer::AreSound(const FusedrecPoolMoves& moves) const {
  if (moves.leaving < 0 || moves.kept < 0 || moves.dropped < 0) return false;
  const int64_t* const slots = moves.numbers + moves.leaving + moves.kept;
  return AreBelow(moves.numbers, moves.leaving + moves.kept, active()->num_rows()) &&
         AreSlots(slots, moves.kept + moves.dropped);
}

int FusedrecDeviceBuffer::CopySlots(const int64_t* slots, int64_t count, char* records, void* stream) const {
  if (count == 0) return kCudaSuccess;
  FUSEDREC_LAUNCH(CopyRecordsKernel, BlocksFor(32 * count, kPoolThreads), kPoolThreads, 0, stream, pool_.data(), slots,
                  count, record_bytes(), records);
  return LastError();
}

int FusedrecDeviceBuffer::Move(const FusedrecPoolMoves& moves, const int64_t* numbers, void* stream) {
  const int64_t *const rows = numbers + moves.leaving, *const slots = rows + moves.kept;
  const int64_t* const dropped = slots + moves.kept;
  char* const of_dropped = out_.data() + moves.leaving * record_bytes();
  FUSEDREC_RETURN_IF_CUDA_ERROR(active()->ReadRecordsOf(numbers, nullptr, moves.leaving, out_.data(), stream));
  // Before other rows come into these slots.
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopySlots(dropped, moves.dropped, of_dropped, stream));
  return active()->ReadRecordsOf(rows, slots, moves.kept, pool_.data(), stream);
}

int fusedrec_buffer_read_hot(FusedrecDeviceBuffer* buffer, const int64_t* slots, int64_t count, const char** records,
                             void* stream) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  if (count < 0 || !buffer->AreSlots(slots, count)) return kCudaInvalidValue;
  if (buffer->waiting_ > 0) return kDeviceNotWritten;
  FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->MakeRoomToReturn(count));
  const Memory memory(buffer->allocator_, count * sizeof(int64_t));
  if (memory.data() == nullptr) return kDeviceOutOfMemory;
  auto* const on_device = reinterpret_cast<int64_t*>(memory.data());
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(on_device, slots, count, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->CopySlots(on_device, count, buffer->out_.data(), stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(buffer->CopyOut(count, stream));
  return buffer->Returned(records);
}
