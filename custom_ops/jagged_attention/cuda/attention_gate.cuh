// Gate and norm behind the attention on a GPU: gate * norm(attended), or norm(gate * attended).
//
// A warp owns a group of columns of one token: all of the token's columns, or a head's. Forward, the last block that
// finishes a head of a tile of queries gates the tile, so that the attention is still in the cache. Backward, one
// kernel makes the gradients of gate and attention before the passes of the attention. The weights of the norm have a
// kernel of their own. A thread owns a column, a block owns some tokens and a slot for its sums.
#pragma once

#include "common/number.cuh"
#include "jagged_attention/cuda/attention_problem.cuh"

namespace fusedrec::attention {

constexpr int64_t kGateTokens = 64;  // at least so many of them share a slot

// Gate and norm of a call. `at` is an entry of an array [Tq, columns].
template <typename T>
struct OutputGate {
  const Problem<T>& call;
  const int64_t columns, groups, width;  // of all heads; groups of a token, and columns of each

  __device__ explicit OutputGate(const Problem<T>& problem)
      : call(problem), columns(problem.heads * problem.value_dim), groups(problem.per_head ? problem.heads : 1),
        width(columns / groups) {}

  __device__ float Input(int64_t at) const {
    const float x = ToFloat(call.out[at]);
    return call.gate_first ? x * ToFloat(call.gate[at]) : x;
  }
  __device__ float Weighted(float normalized, int64_t column) const {
    return call.norm_weight == nullptr ? normalized : normalized * call.norm_weight[column] + call.norm_bias[column];
  }
  __device__ float Behind(int64_t at) const {
    return call.gate_first ? ToFloat(call.grads[at]) : ToFloat(call.grads[at]) * ToFloat(call.gate[at]);
  }
};

// Mean and deviation of a group of one token, the same in all lanes of a warp.
template <typename T>
struct GroupNorm {
  __device__ GroupNorm(const OutputGate<T>& gate, int64_t begin) {
    const float width = static_cast<float>(gate.width);
    float sum = 0.0f, squares = 0.0f;
    for (int64_t c = Lane(); c < gate.width; c += 32) sum += gate.Input(begin + c);
    mean = WarpSum(sum) / width;
    for (int64_t c = Lane(); c < gate.width; c += 32) {
      const float centred = gate.Input(begin + c) - mean;
      squares += centred * centred;
    }
    inverse = 1.0f / sqrtf(WarpSum(squares) / width + gate.call.epsilon);
  }
  __device__ float Of(float input) const { return (input - mean) * inverse; }

  float mean, inverse;
};

// Gates tokens [first, last), by all warps of a block.
template <typename T>
__device__ inline void GateTokens(const OutputGate<T>& gate, int64_t first, int64_t last) {
  for (int64_t n = first * gate.groups + Warp(); n < last * gate.groups; n += blockDim.x / 32) {
    const int64_t begin = n * gate.width;
    const GroupNorm<T> norm(gate, begin);
    for (int64_t c = Lane(); c < gate.width; c += 32) {
      const float y = gate.Weighted(norm.Of(gate.Input(begin + c)), (begin + c) % gate.columns);
      gate.call.gated[begin + c] = FromFloat<T>(gate.call.gate_first ? y : y * ToFloat(gate.call.gate[begin + c]));
    }
  }
}

// Returns whether this block is the last of `heads` blocks that have written a tile, which then all threads may read.
__device__ inline bool IsLastOf(int64_t heads, int* done) {
  FUSEDREC_SHARED(int, last, 1);
  __threadfence();  // the numbers of this thread come before the count
  __syncthreads();
  if (threadIdx.x == 0) last[0] = atomicAdd(done, 1) == static_cast<int>(heads) - 1;
  __syncthreads();
  __threadfence();  // the numbers of the other blocks come behind it
  return last[0] != 0;
}

// Gradients of gate and attention; engine_gate.inc.h has the formulas. A warp for each group of a token.
template <typename T>
FUSEDREC_KERNEL GateGradsKernel(Problem<T> problem) {
  const OutputGate<T> gate(problem);
  const int64_t n = GlobalThread() / 32;
  if (n >= problem.queries * gate.groups) return;
  const int64_t begin = n * gate.width;
  const GroupNorm<T> norm(gate, begin);
  const auto weight_of = [&](int64_t at) { return problem.norm_weight == nullptr ? 1.0f : problem.norm_weight[at % gate.columns]; };
  float sum = 0.0f, products = 0.0f;
  for (int64_t at = begin + Lane(); at < begin + gate.width; at += 32) {
    const float dn = gate.Behind(at) * weight_of(at);
    sum += dn;
    products += dn * norm.Of(gate.Input(at));
  }
  const float mean = WarpSum(sum) / static_cast<float>(gate.width);
  const float projection = WarpSum(products) / static_cast<float>(gate.width);
  for (int64_t at = begin + Lane(); at < begin + gate.width; at += 32) {
    const float attended = ToFloat(problem.out[at]), factor = ToFloat(problem.gate[at]), dy = ToFloat(problem.grads[at]);
    const float normalized = norm.Of(gate.Input(at));
    const float dx = (gate.Behind(at) * weight_of(at) - mean - normalized * projection) * norm.inverse;
    const float du = problem.gate_first ? dx * attended : dy * gate.Weighted(normalized, at % gate.columns);
    problem.attended_grads[at] = FromFloat<T>(problem.gate_first ? dx * factor : dx);
    problem.gate_grads[at] = FromFloat<T>(du);
  }
  if (problem.statistics == nullptr || Lane() != 0) return;
  problem.statistics[2 * n] = norm.mean;
  problem.statistics[2 * n + 1] = norm.inverse;
}

// Sums for the weights of the norm: a thread for each column and slot.
template <typename T>
FUSEDREC_KERNEL NormGradsKernel(Problem<T> problem) {
  const OutputGate<T> gate(problem);
  const int64_t n = GlobalThread();
  if (n >= problem.gate_slots * gate.columns) return;
  const int64_t slot = n / gate.columns, column = n % gate.columns, group = column / gate.width;
  const int64_t share = (problem.queries + problem.gate_slots - 1) / problem.gate_slots;
  const int64_t last = (slot + 1) * share < problem.queries ? (slot + 1) * share : problem.queries;
  float weight = 0.0f, bias = 0.0f;
  for (int64_t token = slot * share; token < last; ++token) {
    const int64_t at = token * gate.columns + column;
    const float* const statistics = problem.statistics + 2 * (token * gate.groups + group);
    const float behind = gate.Behind(at);
    weight += behind * (gate.Input(at) - statistics[0]) * statistics[1];
    bias += behind;
  }
  problem.weight_slots[n] = weight;
  problem.bias_slots[n] = bias;
}

}  // namespace fusedrec::attention
