// The gate of a call, and launches of its gradients.
#pragma once

#include <algorithm>

#include "common/launcher.cuh"
#include "jagged_attention/cuda/attention_gate.cuh"
#include "jagged_attention/cuda/jagged_attention_cuda.h"

namespace fusedrec {
namespace attention {

// Tokens that ask.
inline int64_t NumQueries(const FusedrecAttention& call) {
  return call.query_splits == nullptr ? call.tokens : call.query_splits[call.batch];
}

inline int64_t GateSlots(const FusedrecAttention& call) {
  return std::min((NumQueries(call) + kGateTokens - 1) / kGateTokens, kAttentionSlots);
}

// The scratch of the gate, on the device; null where there is no gate.
struct GateArrays {
  int* done = nullptr;
  void* attended_grads = nullptr;
  float *statistics = nullptr, *weight_slots = nullptr, *bias_slots = nullptr;

  GateArrays() = default;
  GateArrays(Carver* carver, const FusedrecAttention& call, int64_t items) {
    if (call.gate == nullptr) return;
    const int64_t columns = call.heads * call.value_dim, tokens = NumQueries(call), slots = GateSlots(call);
    done = carver->Take<int>(items);
    attended_grads = carver->Take<char>(tokens * columns * (call.type == kNumberFloat ? 4 : 2));
    if (call.norm_weight == nullptr) return;
    statistics = carver->Take<float>(tokens * (call.per_head ? call.heads : 1) * 2);
    weight_slots = carver->Take<float>(slots * columns);
    bias_slots = carver->Take<float>(slots * columns);
  }
};

template <typename T>
OutputGate<T> GateOf(const FusedrecAttention& call, const GateArrays& at) {
  OutputGate<T> gate{};
  gate.gate = static_cast<const T*>(call.gate);
  gate.columns = call.heads * call.value_dim;
  gate.tokens = NumQueries(call);
  gate.groups = call.per_head ? call.heads : 1;
  gate.width = gate.columns / gate.groups;
  gate.first = call.gate_first != 0;
  gate.epsilon = static_cast<float>(call.epsilon);
  gate.weight = call.norm_weight;
  gate.bias = call.norm_bias;
  gate.attended = static_cast<const T*>(call.out);
  gate.result = static_cast<T*>(call.gated);
  gate.done = at.done;
  gate.grads = static_cast<const T*>(call.grads);
  gate.gate_grads = static_cast<T*>(call.gate_grads);
  gate.attended_grads = static_cast<T*>(at.attended_grads);
  gate.statistics = at.statistics;
  gate.weight_slots = at.weight_slots;
  gate.bias_slots = at.bias_slots;
  gate.slots = GateSlots(call);
  return gate;
}

// Makes the gradients of the gate and of the attention, and the sums for the norm's weights.
template <typename T>
int LaunchGateGrads(const OutputGate<T>& gate, void* stream) {
  const int64_t groups = gate.tokens * gate.groups;
  if (groups * gate.width == 0) return kCudaSuccess;
  FUSEDREC_LAUNCH(GateGradsKernel<T>, BlocksFor(groups * 32, kGateThreads), kGateThreads, 0, stream, gate);
  if (gate.weight != nullptr) {
    FUSEDREC_LAUNCH(NormGradsKernel<T>, BlocksFor(gate.slots * gate.columns, kGateThreads), kGateThreads, 0, stream,
                    gate);
  }
  return LastError();
}

}  // namespace attention
}  // namespace fusedrec
