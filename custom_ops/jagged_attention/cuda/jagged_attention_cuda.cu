#include "jagged_attention/cuda/jagged_attention_cuda.h"

#include <algorithm>
#include <vector>

#include "jagged_attention/cuda/attention_channels_launch.cuh"
#include "jagged_attention/cuda/attention_launch.cuh"

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

// Keys or queries of a row.
int64_t NumOf(const FusedrecAttention& call, int64_t row, bool keys) {
  const int64_t* splits = keys || call.query_splits == nullptr ? call.row_splits : call.query_splits;
  return splits[row + 1] - splits[row];
}

// Tiles of rows of all sequences, the costliest first. A query of a causal row sees the tokens before it. A key is seen by
// the tokens after it.
std::vector<Item> ItemsOf(const FusedrecAttention& call, bool keys) {
  std::vector<Item> items;
  const int rows = RowsOf(call.type);
  for (int64_t b = 0; b < call.batch; ++b) {
    const int length = static_cast<int>(call.row_splits[b + 1] - call.row_splits[b]);
    const int first = keys ? 0 : length - static_cast<int>(NumOf(call, b, false));
    for (int begin = first; begin < length; begin += rows) items.push_back({static_cast<int>(b), begin});
  }
  const auto cost = [&](const Item& item) {
    return keys ? call.row_splits[item.row + 1] - call.row_splits[item.row] - item.begin : item.begin;
  };
  std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
  return items;
}

int64_t NumItems(const FusedrecAttention& call, bool keys) {
  int64_t items = 0;
  const int64_t rows = RowsOf(call.type);
  for (int64_t b = 0; b < call.batch; ++b) items += (NumOf(call, b, keys) + rows - 1) / rows;
  return items;
}

// parts: blocks of work of each item: heads, or slices of columns.
struct Scratch {
  Scratch(void* memory, const FusedrecAttention& call, int64_t parts) : carver(memory) {
    at.row_splits = carver.Take<int64_t>(call.batch + 1);
    at.num_targets = carver.Take<int64_t>(call.batch);
    at.contextual_lengths = carver.Take<int64_t>(call.batch);
    at.query_splits = carver.Take<int64_t>(call.batch + 1);
    at.thresholds = carver.Take<int64_t>(std::max<int64_t>(call.num_thresholds, 0));
    for (int keys = 0; keys < 2; ++keys) {
      at.num_items[keys] = NumItems(call, keys == 1);
      at.items[keys] = carver.Take<Item>(at.num_items[keys]);
    }
    slots = SlotsOf(at.num_items[1] * parts);
    position_size = call.max_length > 0 ? 2 * call.max_length - 1 : 0;
    time_size = NumTimeWeights(call);
    at.position_slots = carver.Take<float>(slots * position_size);
    at.time_slots = carver.Take<float>(slots * time_size);
    at.gate = GateArrays(&carver, call, at.num_items[0]);
  }
  Carver carver;
  DeviceArrays at;
  int64_t slots, position_size, time_size;
};

constexpr int64_t kMost = (int64_t{1} << 31) - 1;  // of sizes, and of the blocks of a launch

bool SizesAreSound(const FusedrecAttention& call) {
  for (const int64_t size : {call.tokens, call.heads, call.qk_dim, call.value_dim, call.target_group_size - 1,
                             call.attention_window, call.min_full_length, call.global_window, call.max_length}) {
    if (size < 0) return false;
  }
  return call.type >= 0 && call.type <= 2 && call.tokens <= kMost && call.heads >= 1 && call.heads <= kMost &&
         call.max_length <= kMost / 2 && call.num_thresholds >= -1 && call.num_thresholds <= kAttentionMaxThresholds;
}

bool RowsAreSound(const FusedrecAttention& call) {
  if (!SplitsAreSound(call.row_splits, call.batch, call.tokens)) return false;
  if (call.query_splits != nullptr && call.query_splits[0] != 0) return false;
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t length = call.row_splits[b + 1] - call.row_splits[b];
    if (call.max_length > 0 && length > call.max_length) return false;
    const int64_t queries = NumOf(call, b, false);
    if (queries < 0 || queries > length) return false;
    if (call.num_targets != nullptr && (call.num_targets[b] < 0 || call.num_targets[b] > queries)) return false;
    if (call.contextual_lengths != nullptr && call.contextual_lengths[b] < 0) return false;
  }
  for (int64_t g = 1; g < call.num_thresholds; ++g) {
    if (call.thresholds[g] < call.thresholds[g - 1]) return false;
  }
  return true;
}

bool TimeIsSound(const FusedrecAttention& call) {
  return call.time_function >= kNoFunction && call.time_function <= kStretched &&
         (call.time_function == kNoFunction || call.num_thresholds < 0);
}

bool AttentionIsSound(const FusedrecAttention& call) {
  return SizesAreSound(call) && call.qk_dim <= kAttentionMaxDim && call.value_dim <= kAttentionMaxDim &&
         (call.norm_weight == nullptr) == (call.norm_bias == nullptr) &&
         (call.gate == nullptr || NumQueries(call) <= kMost / (call.per_head ? call.heads : 1)) &&
         TimeIsSound(call) && RowsAreSound(call) && NumItems(call, true) <= kMost / call.heads;
}

bool ChannelsAreSound(const FusedrecAttention& call) {
  return SizesAreSound(call) && call.value_dim <= kMost / (kMaxChannels * call.heads) && TimeIsSound(call) &&
         RowsAreSound(call) && NumItems(call, true) * SlicesOf(call) <= kMost;
}

// Copies the host arrays to the device and clears the sums of distances.
int Prepare(const FusedrecAttention& call, const Scratch& scratch, bool backward, void* stream) {
  const DeviceArrays& at = scratch.at;
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.row_splits, call.row_splits, call.batch + 1, stream));
  if (call.num_targets != nullptr) {
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.num_targets, call.num_targets, call.batch, stream));
  }
  if (call.contextual_lengths != nullptr) {
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.contextual_lengths, call.contextual_lengths, call.batch, stream));
  }
  if (call.query_splits != nullptr) {
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.query_splits, call.query_splits, call.batch + 1, stream));
  }
  if (call.num_thresholds > 0) {
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.thresholds, call.thresholds, call.num_thresholds, stream));
  }
  for (int keys = 0; keys < (backward ? 2 : 1); ++keys) {
    const std::vector<Item> items = ItemsOf(call, keys == 1);
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.items[keys], items.data(), at.num_items[keys], stream));
  }
  if (!backward) {
    return Fill(at.gate.done, 0, call.gate == nullptr ? 0 : at.num_items[0] * sizeof(int), stream);
  }
  const int64_t floats = scratch.slots * scratch.position_size;
  return Fill(at.position_slots, 0, floats * static_cast<int64_t>(sizeof(float)), stream);
}

// Gradients of the weights of bias and norm from the sums of the blocks.
int SumWeightGrads(const FusedrecAttention& call, const Scratch& scratch, void* stream) {
  if (scratch.position_size > 0) {
    FUSEDREC_LAUNCH(SumSlotsKernel, BlocksFor(scratch.position_size, 256), 256, 0, stream, scratch.at.position_slots,
                    scratch.slots, scratch.position_size, call.position_grads);
  }
  if (scratch.time_size > 0) {
    FUSEDREC_LAUNCH(SumSlotsKernel, BlocksFor(scratch.time_size, 256), 256, 0, stream, scratch.at.time_slots,
                    scratch.slots, scratch.time_size, call.time_grads);
  }
  const int64_t columns = call.heads * call.value_dim;
  if (call.gate != nullptr && call.norm_weight != nullptr && columns > 0) {
    const GateArrays& gate = scratch.at.gate;
    FUSEDREC_LAUNCH(SumSlotsKernel, BlocksFor(columns, 256), 256, 0, stream, gate.weight_slots, GateSlots(call),
                    columns, call.norm_weight_grads);
    FUSEDREC_LAUNCH(SumSlotsKernel, BlocksFor(columns, 256), 256, 0, stream, gate.bias_slots, GateSlots(call), columns,
                    call.norm_bias_grads);
  }
  return LastError();
}

auto* ChannelsOf(const FusedrecAttention& call) {
  return call.type == kNumberFloat  ? &Channels<float>
         : call.type == kNumberHalf ? &Channels<Half>
                                    : &Channels<Bfloat16>;
}

}  // namespace
}  // namespace attention
}  // namespace fusedrec

using namespace fusedrec;             // NOLINT
using namespace fusedrec::attention;  // NOLINT

int64_t fusedrec_jagged_attention_scratch_bytes(const FusedrecAttention* call) {
  return Scratch(nullptr, *call, call->heads).carver.bytes();
}

int fusedrec_jagged_attention(const FusedrecAttention* call, void* scratch, void* stream) {
  if (!AttentionIsSound(*call)) return kCudaInvalidValue;
  const Scratch at(scratch, *call, call->heads);
  FUSEDREC_RETURN_IF_CUDA_ERROR(Prepare(*call, at, false, stream));
  auto* const run = call->type == kNumberFloat  ? &Forward<float>
                    : call->type == kNumberHalf ? &Forward<Half>
                                                : &Forward<Bfloat16>;
  return run(*call, at.at, stream);
}

int fusedrec_jagged_attention_grad(const FusedrecAttention* call, void* scratch, void* stream) {
  if (!AttentionIsSound(*call)) return kCudaInvalidValue;
  const Scratch at(scratch, *call, call->heads);
  FUSEDREC_RETURN_IF_CUDA_ERROR(Prepare(*call, at, true, stream));
  auto* const run = call->type == kNumberFloat  ? &Backward<float>
                    : call->type == kNumberHalf ? &Backward<Half>
                                                : &Backward<Bfloat16>;
  FUSEDREC_RETURN_IF_CUDA_ERROR(run(*call, at.at, stream));
  return SumWeightGrads(*call, at, stream);
}

int64_t fusedrec_bias_attention_scratch_bytes(const FusedrecAttention* call) {
  return Scratch(nullptr, *call, SlicesOf(*call)).carver.bytes();
}

int fusedrec_bias_attention(const FusedrecAttention* call, void* scratch, void* stream) {
  if (!ChannelsAreSound(*call)) return kCudaInvalidValue;
  const Scratch at(scratch, *call, SlicesOf(*call));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Prepare(*call, at, false, stream));
  return ChannelsOf(*call)(*call, at.at, false, stream);
}

int fusedrec_bias_attention_grad(const FusedrecAttention* call, void* scratch, void* stream) {
  if (!ChannelsAreSound(*call)) return kCudaInvalidValue;
  const Scratch at(scratch, *call, SlicesOf(*call));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Prepare(*call, at, true, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(ChannelsOf(*call)(*call, at.at, true, stream));
  return SumWeightGrads(*call, at, stream);
}
