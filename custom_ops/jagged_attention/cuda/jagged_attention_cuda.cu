#include "jagged_attention/cuda/jagged_attention_cuda.h"

#include <vector>

#include "jagged_attention/cuda/attention_launch.cuh"

namespace fusedrec::attention {
namespace {

constexpr int64_t kSlots = 512;  // not the device's: the order of sums must not depend on it
constexpr int64_t kMost = (int64_t{1} << 31) - 1;  // of sizes, and of the blocks of a launch

// sums[x] = sum over the slots of slots[slot, x], in their order.
FUSEDREC_KERNEL SumSlotsKernel(const float* __restrict__ slots, int64_t num_slots, int64_t size,
                               float* __restrict__ sums) {
  const int64_t x = GlobalThread();
  if (x >= size) return;
  float sum = 0.0f;
  for (int64_t slot = 0; slot < num_slots; ++slot) sum += slots[slot * size + x];
  sums[x] = sum;
}

int SumSlots(const float* slots, int64_t num_slots, int64_t size, float* sums, void* stream) {
  FUSEDREC_FOR_EACH(SumSlotsKernel, size, stream, slots, num_slots, size, sums);
  return LastError();
}

// Rows of a tile: the list of items needs it before the size of heads is known.
int RowsOf(const AttentionCall<void>& call) { return call.type == kNumberFloat ? 32 : 64; }

// Number of tiles that ItemsOf lists.
int64_t NumItems(const AttentionCall<void>& call, bool keys) {
  int64_t items = 0;
  for (int64_t b = 0; b < call.batch; ++b) {
    items += (RowLength(call, b) - (keys ? 0 : FirstQuery(call, b)) + RowsOf(call) - 1) / RowsOf(call);
  }
  return items;
}

// Tiles of rows of all sequences, the costliest first. A query of a causal row sees the tokens before it. A key is seen by
// the tokens after it.
std::vector<Item> ItemsOf(const AttentionCall<void>& call, bool keys) {
  std::vector<Item> items;
  const int rows = RowsOf(call);
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t length = RowLength(call, b);
    for (int64_t begin = keys ? 0 : FirstQuery(call, b); begin < length; begin += rows) {
      items.push_back({static_cast<int>(b), static_cast<int>(begin)});
    }
  }
  const auto cost = [&](const Item& item) { return keys ? RowLength(call, item.row) - item.begin : item.begin; };
  std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
  return items;
}

// Blocks of work of an item: heads, or slices of columns.
int64_t PartsOf(const AttentionCall<void>& call) {
  if (call.channels == 0) return call.heads;
  return (call.heads * call.value_dim + SliceColumns(call) - 1) / SliceColumns(call);
}

// Copies the host arrays of a call to the device and clears what blocks add to.
int Prepare(const AttentionCall<void>& call, bool backward, ScratchMemory* memory, Problem<void>* problem, void* stream) {
  static_cast<AttentionCall<void>&>(*problem) = call;
  const int64_t columns = call.heads * call.value_dim, parts = PartsOf(call);
  const int64_t blocks = std::max(NumItems(call, false), backward ? NumItems(call, true) : 0) * parts;
  if (std::max({call.tokens, call.per_head ? call.queries * call.heads : 0, call.channels * columns,
                2 * call.bias.max_length, blocks}) > kMost) {
    return kCudaInvalidValue;
  }
  const std::vector<Item> items[2] = {ItemsOf(call, false), backward ? ItemsOf(call, true) : std::vector<Item>()};
  const bool gate_grads = backward && call.gate != nullptr, norm_grads = gate_grads && call.norm_weight != nullptr;
  problem->slices = parts;
  problem->slots = std::min(static_cast<int64_t>(items[1].size()) * parts, kSlots);
  problem->gate_slots = std::min((call.queries + kGateTokens - 1) / kGateTokens, kSlots);
  const int64_t positions = std::max<int64_t>(2 * call.bias.max_length - 1, 0) * problem->slots;

  const int64_t** const arrays[] = {&problem->row_splits, &problem->query_splits, &problem->num_targets,
                                    &problem->contextual_lengths, &problem->bias.thresholds};
  const int64_t counts[] = {call.batch + 1, call.batch + 1, call.num_targets == nullptr ? 0 : call.batch,
                            call.contextual_lengths == nullptr ? 0 : call.batch, call.bias.num_thresholds};
  int64_t* copies[5];
  Item* device_items[2];
  char* attended_grads;
  const int64_t query_items = items[0].size(), key_items = items[1].size();
  const int64_t grad_bytes = gate_grads ? call.queries * columns * (call.type == kNumberFloat ? 4 : 2) : 0;
  const int64_t statistics = norm_grads ? call.queries * (call.per_head ? call.heads : 1) * 2 : 0;
  const int64_t norm_slots = norm_grads ? problem->gate_slots * columns : 0;
  FUSEDREC_TRY(memory->Take({{&copies[0], counts[0]}, {&copies[1], counts[1]}, {&copies[2], counts[2]},
      {&copies[3], counts[3]}, {&copies[4], counts[4]}, {&device_items[0], query_items}, {&device_items[1], key_items},
      {&problem->position_slots, positions}, {&problem->time_slots, NumTimeWeights(call.bias) * problem->slots},
      {&problem->done, call.gate == nullptr ? 0 : query_items}, {&attended_grads, grad_bytes},
      {&problem->statistics, statistics}, {&problem->weight_slots, norm_slots}, {&problem->bias_slots, norm_slots}}));
  problem->attended_grads = attended_grads;
  if (!norm_grads) problem->statistics = nullptr;
  for (int a = 0; a < 5; ++a) {
    FUSEDREC_TRY(CopyToDevice(copies[a], *arrays[a], counts[a], stream));
    if (*arrays[a] != nullptr) *arrays[a] = copies[a];
  }
  for (int keys = 0; keys < 2; ++keys) {
    problem->items[keys] = device_items[keys];
    problem->num_items[keys] = items[keys].size();
    FUSEDREC_TRY(CopyToDevice(device_items[keys], items[keys].data(), items[keys].size(), stream));
  }
  if (call.gate != nullptr) FUSEDREC_TRY(Fill(problem->done, 0, query_items * sizeof(int), stream));
  return Fill(problem->position_slots, 0, positions * sizeof(float), stream);
}

int Compute(const AttentionCall<void>& call, bool backward, const FusedrecAllocator* from, void* stream) {
  ScratchMemory memory(from);
  Problem<void> problem{};
  FUSEDREC_TRY(Prepare(call, backward, &memory, &problem, stream));
  const auto run = call.type == kNumberFloat ? &Run<float> : call.type == kNumberHalf ? &Run<Half> : &Run<Bfloat16>;
  FUSEDREC_TRY(run(problem, backward, stream));
  if (!backward) return kCudaSuccess;
  // Gradients of the weights of bias and norm, from the sums of the blocks.
  const int64_t positions = std::max<int64_t>(2 * call.bias.max_length - 1, 0);
  const int64_t columns = problem.statistics == nullptr ? 0 : call.heads * call.value_dim;
  FUSEDREC_TRY(SumSlots(problem.position_slots, problem.slots, positions, call.position_grads, stream));
  FUSEDREC_TRY(SumSlots(problem.time_slots, problem.slots, NumTimeWeights(call.bias), call.time_grads, stream));
  FUSEDREC_TRY(SumSlots(problem.weight_slots, problem.gate_slots, columns, call.norm_weight_grads, stream));
  return SumSlots(problem.bias_slots, problem.gate_slots, columns, call.norm_bias_grads, stream);
}

}  // namespace
}  // namespace fusedrec::attention

int fusedrec_attention(const fusedrec::AttentionCall<void>* call, const FusedrecAllocator* memory, void* stream) {
  return fusedrec::attention::Compute(*call, false, memory, stream);
}

int fusedrec_attention_grad(const fusedrec::AttentionCall<void>* call, const FusedrecAllocator* memory, void* stream) {
  return fusedrec::attention::Compute(*call, true, memory, stream);
}
