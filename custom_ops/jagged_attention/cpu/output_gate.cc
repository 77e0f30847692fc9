#include "jagged_attention/cpu/output_gate.h"

#include <algorithm>

#include "jagged_attention/cpu/units.h"

namespace fusedrec {
namespace {

constexpr int64_t kChunkTokens = 256;  // of the sums for the norm's weights, whatever the number of threads

}  // namespace

OutputGate OutputGateOf(int64_t heads, int64_t value_dim, const GateInputs& inputs) {
  OutputGate gate{};
  gate.columns = heads * value_dim;
  gate.groups = inputs.per_head ? std::max<int64_t>(heads, 1) : 1;
  gate.gate_first = inputs.gate_first;
  gate.epsilon = inputs.epsilon;
  gate.gate = inputs.gate;
  if (!inputs.weight.empty()) {
    gate.weight = inputs.weight.data();
    gate.bias = inputs.bias.data();
  }
  return gate;
}

GateAfterUnits::GateAfterUnits(const AttentionProblem& problem, const std::vector<AttentionUnit>& units,
                               const OutputGate& gate, const GatePasses& passes)
    : problem_(problem), units_(units), gate_(gate), passes_(passes), block_(units.size()), open_(units.size()) {
  int32_t block = -1;
  for (size_t u = 0; u < units.size(); ++u) {
    if (u == 0 || units[u].row != units[u - 1].row || units[u].begin != units[u - 1].begin) ++block;
    block_[u] = block;
    ++open_[block];
  }
}

void GateAfterUnits::Done(int32_t number) {
  // Acquires what the other units of the block have released: their columns of the attention.
  if (open_[block_[number]].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  const AttentionUnit& unit = units_[number];
  const int64_t start = problem_.query_splits[unit.row] - FirstQuery(problem_, unit.row);
  passes_.forward(gate_, start + unit.begin, start + unit.end);
}

void OutputGateGrad(int64_t heads, int64_t value_dim, int64_t tokens, const GateInputs& inputs, const float* attended,
                    const float* grads, const TileEngine& engine, const ParallelFor& parallel_for,
                    float* attended_grads, const GateGrads& gate_grads) {
  OutputGate gate = OutputGateOf(heads, value_dim, inputs);
  gate.attended = attended;
  gate.grads = grads;
  gate.gate_grads = gate_grads.gate;
  gate.attended_grads = attended_grads;
  const int64_t chunks = (tokens + kChunkTokens - 1) / kChunkTokens, weights = gate_grads.weight.size();
  std::vector<float> sums(chunks * 2 * weights, 0.0f);
  parallel_for(chunks, kChunkTokens * gate.columns * 8, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      float* const weight_sums = sums.data() + chunk * 2 * weights;
      const int64_t begin = chunk * kChunkTokens;
      engine.gate.backward(gate, begin, std::min(begin + kChunkTokens, tokens), weight_sums, weight_sums + weights);
    }
  });
  for (int64_t c = 0; c < weights; ++c) {
    double weight = 0.0, bias = 0.0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      weight += sums[chunk * 2 * weights + c];
      bias += sums[(chunk * 2 + 1) * weights + c];
    }
    gate_grads.weight[c] = static_cast<float>(weight);
    gate_grads.bias[c] = static_cast<float>(bias);
  }
}

}  // namespace fusedrec
