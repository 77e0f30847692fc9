// The pool of hot rows; buffer_cuda.h explains it.
#include <algorithm>

#include "hash_table/cuda/buffer/buffer.h"
#include "hash_table/cuda/buffer/pool.cuh"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

namespace {

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

int FusedrecDeviceBuffer::ReadHot(const int64_t* slots, int64_t count, const char** records, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (count < 0 || !AreSlots(slots, count)) return kCudaInvalidValue;
  if (waiting_ > 0) return kDeviceNotWritten;
  FUSEDREC_RETURN_IF_CUDA_ERROR(MakeRoomToReturn(count));
  const Memory memory(allocator_, count * sizeof(int64_t));
  if (memory.data() == nullptr) return kDeviceOutOfMemory;
  auto* const on_device = reinterpret_cast<int64_t*>(memory.data());
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(on_device, slots, count, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopySlots(on_device, count, out_.data(), stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyOut(count, stream));
  return Returned(records);
}
