#include "jagged_attention/cpu/jagged_attention.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "jagged_attention/cpu/prepared_bias.h"
#include "jagged_attention/cpu/units.h"

namespace fusedrec {
namespace {

#include "jagged_attention/visibility.inc.h"

constexpr int64_t kChunkTokens = 256;  // of the sums for the norm's weights, whatever the number of threads

// Gates the queries of forward units. The last unit of the same queries does it, because a norm needs all heads.
class GateAfterUnits {
 public:
  // Units of the same queries lie together.
  GateAfterUnits(const AttentionProblem& problem, const std::vector<AttentionUnit>& units, const GatePasses& passes)
      : problem_(problem), units_(units), passes_(passes), block_(units.size()), open_(units.size()) {
    int32_t block = -1;
    for (size_t u = 0; u < units.size(); ++u) {
      if (u == 0 || units[u].row != units[u - 1].row || units[u].begin != units[u - 1].begin) ++block;
      block_[u] = block;
      ++open_[block];
    }
  }

  // Comes from the thread that has done a unit.
  void Done(int32_t number) {
    // Acquires what the other units of the block have released: their columns of the attention.
    if (open_[block_[number]].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    const AttentionUnit& unit = units_[number];
    const int64_t start = QueryStart(problem_, unit.row);
    passes_.forward(problem_, start + unit.begin, start + unit.end);
  }

 private:
  const AttentionProblem& problem_;
  const std::vector<AttentionUnit>& units_;
  const GatePasses& passes_;
  std::vector<int32_t> block_;              // of each unit
  std::vector<std::atomic<int32_t>> open_;  // units that a block waits for
};

// Gradients of the gate, the norm and the attention.
void GateGrads(const AttentionProblem& problem, const GatePasses& passes, const ParallelFor& parallel_for) {
  const int64_t columns = problem.heads * problem.value_dim, weights = problem.norm_weight == nullptr ? 0 : columns;
  const int64_t chunks = (problem.queries + kChunkTokens - 1) / kChunkTokens;
  std::vector<float> sums(chunks * 2 * weights, 0.0f);
  parallel_for(chunks, kChunkTokens * columns * 8, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      float* const weight_sums = sums.data() + chunk * 2 * weights;
      const int64_t begin = chunk * kChunkTokens, end = std::min(begin + kChunkTokens, problem.queries);
      passes.backward(problem, begin, end, weight_sums, weight_sums + weights);
    }
  });
  for (int64_t c = 0; c < weights; ++c) {
    double weight = 0.0, bias = 0.0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      weight += sums[chunk * 2 * weights + c];
      bias += sums[(chunk * 2 + 1) * weights + c];
    }
    problem.norm_weight_grads[c] = static_cast<float>(weight);
    problem.norm_bias_grads[c] = static_cast<float>(bias);
  }
}

}  // namespace

void AttentionForward(const AttentionCall<float>& call, const TileEngine& engine, const ParallelFor& parallel_for) {
  const PreparedBias bias(call.bias);
  const AttentionProblem problem{call, bias.tables(), nullptr};
  const std::vector<AttentionUnit> units = Units(problem, false);
  const TilePasses& passes = call.channels > 0 ? engine.channels : engine.attention;
  if (call.gate == nullptr) return RunUnits(problem, units, passes, false, parallel_for);
  GateAfterUnits gate(problem, units, engine.gate);
  RunUnits(problem, units, passes, false, parallel_for, [&](int32_t unit) { gate.Done(unit); });
}

void AttentionBackward(const AttentionCall<float>& call, const TileEngine& engine, const ParallelFor& parallel_for) {
  const PreparedBias bias(call.bias);
  AttentionProblem problem{call, bias.tables(), nullptr};
  std::unique_ptr<float[]> attended_grads;
  if (call.gate != nullptr) {
    attended_grads.reset(new float[call.queries * call.heads * call.value_dim]);
    problem.attended_grads = attended_grads.get();
    GateGrads(problem, engine.gate, parallel_for);
    problem.grads = attended_grads.get();
  }
  std::vector<AttentionUnit> units = Units(problem, true);
  const UnitGrads memory(problem, bias, &units);
  RunUnits(problem, units, call.channels > 0 ? engine.channels : engine.attention, true, parallel_for);
  if (call.channels == 0) AddQueryGrads(problem, units, parallel_for);
  AddBiasGrads(problem, bias, units);
}

std::vector<const TileEngine*> Engines() {
  std::vector<const TileEngine*> engines;
#if defined(__x86_64__)
  for (const TileEngine* engine : {&kAvx512Engine, &kAvx2Engine}) {
    if (engine->supported()) engines.push_back(engine);
  }
#endif
  engines.push_back(&kGenericEngine);
  return engines;
}

}  // namespace fusedrec
