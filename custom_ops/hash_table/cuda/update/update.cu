// The update; update.cuh says how.
#include <algorithm>

#include "hash_table/cuda/update/handles.cuh"
#include "hash_table/cuda/table.h"
#include "hash_table/cuda/update/update_scratch.h"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

int FusedrecDeviceTable::Apply(const int64_t* handles, int64_t num_rows, const int32_t* inverse, int64_t num_ids,
                               const void* grads, int64_t storage, float scale, const Step& step,
                               int32_t* left_out, int64_t* num_left_out, void* stream) {
  *num_left_out = 0;
  std::lock_guard<std::mutex> lock(mutex_);
  if (storage < 0 || storage > 2 || num_rows < 0 || num_rows > kDeviceTableMaxIds || num_ids < 0 ||
      num_ids > kDeviceTableMaxIds || step.number < 1) {
    return kCudaInvalidValue;
  }
  if (num_rows == 0) {
    if (num_ids > 0) return kDeviceBadInverse;
    ++version_;
    return kCudaSuccess;
  }
  UpdateScratch at(allocator_);
  FUSEDREC_RETURN_IF_CUDA_ERROR(at.Take(num_ids, num_rows));
  HandleFacts facts;
  const Numbers numbers{grads, static_cast<Storage>(storage), num_ids * layout_.dim};
  FUSEDREC_RETURN_IF_CUDA_ERROR(CheckHandles(handles, num_rows, inverse, num_ids, numbers, nullptr, ++attempt_, &facts,
                                             stream));
  if (int64_t{facts.oldest} + options_.window <= moved_at_) return kDeviceStale;
  ++version_;
  if (num_ids == 0) return kCudaSuccess;
  const int32_t* order;
  FUSEDREC_RETURN_IF_CUDA_ERROR(at.Sort(inverse, num_ids, num_rows, &order, stream));
  const GradientColumns columns{grads, static_cast<Storage>(storage), order, 0, 0, layout_.dim, scale, 1.0f};
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(at.count, 0, sizeof(*at.count), stream));
  Train(handles, num_rows, at.begin, columns, step, left_out, at.count, stream);
  if (facts.grads_are_finite != 0) return LastError();
  unsigned counted;
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(&counted, at.count, 1, stream));
  *num_left_out = counted;
  return LastError();
}

void FusedrecDeviceTable::Train(const int64_t* handles, int64_t num_rows, const int32_t* begin,
                                const GradientColumns& grads, const Step& step, int32_t* left_out, unsigned* num_left_out,
                                void* stream) const {
  const uint32_t version = version_;
  std::visit(
      [&](const auto& rule) {
        using R = std::decay_t<decltype(rule)>;
        FUSEDREC_LAUNCH(UpdateKernel<R>, BlocksFor(num_rows * kRowLanes, kUpdateThreads), kUpdateThreads, 0, stream, View(),
                        handles, num_rows, begin, grads, rule, rule.Prepare(step), R::LeavesRows(step), version, left_out,
                        num_left_out);
      },
      rule_);
}

int FusedrecDeviceTable::CheckHandles(const int64_t* handles, int64_t num_handles, const int32_t* inverse,
                                      int64_t num_ids, const Numbers& grads, const uint32_t* sum_of_row,
                                      uint32_t attempt, HandleFacts* known, void* stream) const {
  const Memory memory(allocator_, sizeof(HandleFacts));
  if (memory.data() == nullptr) return kDeviceOutOfMemory;
  auto* const facts = reinterpret_cast<HandleFacts*>(memory.data());
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(facts, 0xff, sizeof(HandleFacts), stream));
  const int64_t most = std::max({num_handles, num_ids, grads.count});
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(BlocksFor(most, kHandleThreads), kHandleBlocks));
  FUSEDREC_LAUNCH(HandleFactsKernel, blocks, kHandleThreads, 0, stream, View(), handles, num_handles, inverse, num_ids,
                  rows_.next, grads, sum_of_row, attempt, facts);
  FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(known, facts, 1, stream));
  if (known->handles_are_sound == 0) return kDeviceBadHandle;
  const bool names_rows = known->oldest != ~0u;
  // All handles must be of one past lookup. Handles of an export have no clock and cannot be trained.
  if (inverse != nullptr && names_rows && (known->oldest != ~known->newest || known->oldest == 0 || known->oldest > clock_)) {
    return kDeviceBadHandle;
  }
  if (known->handles_are_distinct == 0) return kDeviceDoubled;
  return known->inverse_is_sound == 0 ? kDeviceBadInverse : kCudaSuccess;
}
