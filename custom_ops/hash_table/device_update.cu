// The update; device_update.cuh says how.
#include "hash_table/device_update.cuh"

#include <algorithm>

#include "hash_table/device_handles.cuh"
#include "hash_table/device_table.h"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

int FusedrecDeviceTable::Apply(const int64_t* handles, int64_t num_rows, const int32_t* inverse, int64_t num_ids,
                               const void* grads, int64_t storage, float scale, const FusedrecUpdate& update,
                               void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const UpdateRule rule = RuleOf(update);
  if (storage < 0 || storage > 2 || num_rows < 0 || num_rows > num_ids || num_ids > kDeviceTableMaxIds ||
      update.step < 1 || update.rule < 0 || update.rule > 6) {
    return kCudaInvalidValue;
  }
  if (num_rows == 0) {
    if (num_ids > 0) return kDeviceBadInverse;
    ++version_;
    return kCudaSuccess;
  }
  int32_t* begin = nullptr;
  const auto carve = [&](Carver* carver) {
    begin = carver->Take<int32_t>(num_rows + 1);
    return row_sort::Scratch(carver, num_ids);
  };
  Carver counting(nullptr);
  carve(&counting);
  const Memory memory(allocator_, counting.bytes());
  if (memory.data() == nullptr) return kDeviceOutOfMemory;
  uint32_t clock;
  FUSEDREC_RETURN_IF_CUDA_ERROR(CheckHandles(handles, num_rows, inverse, num_ids, &clock, stream));
  if (int64_t{clock} + spec_.window <= moved_at_) return kDeviceStale;
  ++version_;
  Carver carver(memory.data());
  const row_sort::Scratch sort = carve(&carver);
  const int32_t* const order = row_sort::SortByRow(sort, inverse, num_ids, num_rows, stream);
  const row_sort::DigitOf sorted{inverse, order, static_cast<uint32_t>(num_rows), 0};
  FUSEDREC_LAUNCH(BeginsKernel, BlocksFor(num_ids + 1, kUpdateThreads), kUpdateThreads, 0, stream, sorted, num_ids,
                  num_rows, begin);
  const GradientColumns columns{grads, static_cast<Storage>(storage), order, 0, 0, layout_.dim, scale, 1.0f};
  const Prepared by = PrepareStep(rule, {update.learning_rate, update.step});
  const uint32_t version = version_;
  FUSEDREC_LAUNCH(UpdateKernel, BlocksFor(num_rows * kRowLanes, kUpdateThreads), kUpdateThreads, 0, stream, View(),
                  handles, num_rows, begin, columns, rule, by, version);
  return LastError();
}

int FusedrecDeviceTable::CheckHandles(const int64_t* handles, int64_t num_handles, const int32_t* inverse,
                                      int64_t num_ids, uint32_t* clock, void* stream) const {
  const Memory memory(allocator_, sizeof(HandleFacts));
  if (memory.data() == nullptr) return kDeviceOutOfMemory;
  auto* const facts = reinterpret_cast<HandleFacts*>(memory.data());
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(facts, 0xff, sizeof(HandleFacts), stream));
  const unsigned blocks = std::min(BlocksFor(std::max(num_handles, num_ids), kHandleThreads), kHandleBlocks);
  FUSEDREC_LAUNCH(HandleFactsKernel, blocks, kHandleThreads, 0, stream, handles, num_handles, inverse, num_ids,
                  next_row_, facts);
  FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  HandleFacts known;
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(&known, facts, 1, stream));
  *clock = known.oldest;
  if (known.handles_are_sound == 0) return kDeviceBadHandle;
  // Of one lookup, and one that was: those of an export, which nobody trains, have no clock.
  if (inverse != nullptr && (known.oldest != ~known.newest || known.oldest == 0 || known.oldest > clock_)) {
    return kDeviceBadHandle;
  }
  return known.inverse_is_sound == 0 ? kDeviceBadInverse : kCudaSuccess;
}
