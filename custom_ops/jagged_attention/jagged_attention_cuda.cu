#include "jagged_attention/jagged_attention_cuda.h"

#include <algorithm>
#include <vector>

#include "jagged_attention/attention_launch.cuh"

namespace fusedrec {
namespace attention {
namespace {

// sums[x] = sum over the slots of slots[slot, x], in their order.
__global__ void __launch_bounds__(256)
    SumSlotsKernel(const float* __restrict__ slots, int64_t num_slots, int64_t size, float* __restrict__ sums) {
  const int64_t x = GlobalThread();
  if (x >= size) return;
  float sum = 0.0f;
  for (int64_t slot = 0; slot < num_slots; ++slot) sum += slots[slot * size + x];
  sums[x] = sum;
}

// Tiles of rows of all sequences, the costliest first: a query of a causal row sees what is before it, a key is seen by
// what is behind it.
std::vector<Item> ItemsOf(const FusedrecAttention& call, bool keys) {
  std::vector<Item> items;
  const int rows = RowsOf(call.type);
  for (int64_t b = 0; b < call.batch; ++b) {
    const int length = static_cast<int>(call.row_splits[b + 1] - call.row_splits[b]);
    for (int begin = 0; begin < length; begin += rows) items.push_back({static_cast<int>(b), begin});
  }
  const auto cost = [&](const Item& item) {
    return keys ? call.row_splits[item.row + 1] - call.row_splits[item.row] - item.begin : item.begin;
  };
  std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
  return items;
}

int64_t NumItems(const FusedrecAttention& call) {
  int64_t items = 0;
  const int64_t rows = RowsOf(call.type);
  for (int64_t b = 0; b < call.batch; ++b) items += (call.row_splits[b + 1] - call.row_splits[b] + rows - 1) / rows;
  return items;
}

struct Scratch {
  Scratch(void* memory, const FusedrecAttention& call) : carver(memory) {
    at.num_items = NumItems(call);
    at.row_splits = carver.Take<int64_t>(call.batch + 1);
    at.num_targets = carver.Take<int64_t>(call.batch);
    at.thresholds = carver.Take<int64_t>(std::max<int64_t>(call.num_thresholds, 0));
    for (Item*& items : at.items) items = carver.Take<Item>(at.num_items);
    slots = SlotsOf(at.num_items * call.heads);
    position_size = call.max_length > 0 ? 2 * call.max_length - 1 : 0;
    time_size = call.num_thresholds + 1;
    at.position_slots = carver.Take<float>(slots * position_size);
    at.time_slots = carver.Take<float>(slots * time_size);
  }
  Carver carver;
  DeviceArrays at;
  int64_t slots, position_size, time_size;
};

bool IsSound(const FusedrecAttention& call) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  if (call.type < 0 || call.type > 2 || call.tokens > kMost || call.heads < 1 || call.qk_dim > kAttentionMaxDim ||
      call.value_dim > kAttentionMaxDim || call.num_thresholds > kAttentionMaxThresholds ||
      call.max_length > kMost / 2 || !SplitsAreSound(call.row_splits, call.batch, call.tokens)) {
    return false;
  }
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t length = call.row_splits[b + 1] - call.row_splits[b];
    if (call.max_length > 0 && length > call.max_length) return false;
    if (call.num_targets != nullptr && (call.num_targets[b] < 0 || call.num_targets[b] > length)) return false;
  }
  for (int64_t g = 1; g < call.num_thresholds; ++g) {
    if (call.thresholds[g] < call.thresholds[g - 1]) return false;
  }
  return true;
}

// Copies what the host has to the device.
int Prepare(const FusedrecAttention& call, const Scratch& scratch, bool backward, void* stream) {
  const DeviceArrays& at = scratch.at;
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.row_splits, call.row_splits, call.batch + 1, stream));
  if (call.num_targets != nullptr) {
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.num_targets, call.num_targets, call.batch, stream));
  }
  if (call.num_thresholds > 0) {
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.thresholds, call.thresholds, call.num_thresholds, stream));
  }
  for (int keys = 0; keys < (backward ? 2 : 1); ++keys) {
    const std::vector<Item> items = ItemsOf(call, keys == 1);
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.items[keys], items.data(), at.num_items, stream));
  }
  return kCudaSuccess;
}

}  // namespace
}  // namespace attention
}  // namespace fusedrec

using namespace fusedrec;             // NOLINT
using namespace fusedrec::attention;  // NOLINT

int64_t fusedrec_jagged_attention_scratch_bytes(const FusedrecAttention* call) {
  return Scratch(nullptr, *call).carver.bytes();
}

int fusedrec_jagged_attention(const FusedrecAttention* call, void* scratch, void* stream) {
  if (!IsSound(*call)) return kCudaInvalidValue;
  const Scratch at(scratch, *call);
  FUSEDREC_RETURN_IF_CUDA_ERROR(Prepare(*call, at, false, stream));
  auto* const run = call->type == kNumberFloat  ? &Forward<float>
                    : call->type == kNumberHalf ? &Forward<Half>
                                                : &Forward<Bfloat16>;
  return run(*call, at.at, stream);
}

int fusedrec_jagged_attention_grad(const FusedrecAttention* call, void* scratch, void* stream) {
  if (!IsSound(*call)) return kCudaInvalidValue;
  const Scratch at(scratch, *call);
  FUSEDREC_RETURN_IF_CUDA_ERROR(Prepare(*call, at, true, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(
      Fill(at.at.position_slots, 0, at.slots * at.position_size * static_cast<int64_t>(sizeof(float)), stream));
  auto* const run = call->type == kNumberFloat  ? &Backward<float>
                    : call->type == kNumberHalf ? &Backward<Half>
                                                : &Backward<Bfloat16>;
  FUSEDREC_RETURN_IF_CUDA_ERROR(run(*call, at.at, stream));
  if (at.position_size > 0) {
    FUSEDREC_LAUNCH(SumSlotsKernel, BlocksFor(at.position_size, 256), 256, 0, stream, at.at.position_slots, at.slots,
                    at.position_size, call->position_grads);
  }
  if (at.time_size > 0) {
    FUSEDREC_LAUNCH(SumSlotsKernel, BlocksFor(at.time_size, 256), 256, 0, stream, at.at.time_slots, at.slots,
                    at.time_size, call->time_grads);
  }
  return LastError();
}
