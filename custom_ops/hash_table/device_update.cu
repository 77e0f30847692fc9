// The update; device_update.cuh says how.
#include "hash_table/device_update.cuh"

#include "hash_table/device_table.h"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

int FusedrecDeviceTable::Apply(const int64_t* handles, int64_t num_rows, const int32_t* inverse, int64_t num_ids,
                               const void* grads, int64_t storage, float scale, const FusedrecUpdate& update,
                               uint32_t clock, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const UpdateRule rule = RuleOf(update);
  if (storage < 0 || storage > 2 || num_rows < 0 || num_rows > num_ids || num_ids > kDeviceTableMaxIds ||
      update.step < 1 || update.rule < 0 || update.rule > 6) {
    return kCudaInvalidValue;
  }
  if (clock > clock_ || int64_t{clock} + spec_.window <= moved_at_) return kDeviceStale;
  ++version_;
  if (num_rows == 0) return kCudaSuccess;
  int32_t* begin = nullptr;
  const auto carve = [&](Carver* carver) {
    begin = carver->Take<int32_t>(num_rows + 1);
    return row_sort::Scratch(carver, num_ids);
  };
  Carver counting(nullptr);
  carve(&counting);
  const Memory memory(allocator_, counting.bytes());
  if (memory.data() == nullptr) return kDeviceOutOfMemory;
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
