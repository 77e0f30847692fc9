#include "jagged_attention/cpu/jagged_attention.h"

#include "jagged_attention/cpu/output_gate.h"
#include "jagged_attention/cpu/prepared_bias.h"
#include "jagged_attention/cpu/unit_grads.h"
#include "jagged_attention/cpu/units.h"

namespace fusedrec {
namespace {

AttentionProblem ProblemOf(const JaggedRows& rows, const BiasTables& bias) {
  AttentionProblem problem{};
  problem.heads = rows.heads;
  problem.row_splits = rows.row_splits.data();
  problem.query_splits = rows.queries().data();
  problem.num_targets = rows.num_targets.empty() ? nullptr : rows.num_targets.data();
  problem.contextual_lengths = rows.contextual_lengths.empty() ? nullptr : rows.contextual_lengths.data();
  problem.target_group_size = rows.target_group_size;
  problem.attention_window = rows.attention_window;
  problem.min_full_length = rows.min_full_length;
  problem.global_window = rows.global_window;
  problem.dropped = rows.dropped;
  problem.pair_seed = rows.pair_seed;
  problem.bias = bias;
  return problem;
}

AttentionProblem ProblemOf(const JaggedRows& rows, const AttentionInputs& inputs, const BiasTables& bias) {
  AttentionProblem problem = ProblemOf(rows, bias);
  problem.query = inputs.query;
  problem.key = inputs.key;
  problem.value = inputs.value;
  problem.qk_dim = inputs.qk_dim;
  problem.value_dim = inputs.value_dim;
  problem.alpha = inputs.alpha;
  problem.scale = inputs.scale.data();
  problem.scale_stride = inputs.scale_per_token ? 1 : 0;
  return problem;
}

void RunForward(const AttentionProblem& problem, int64_t num_rows, const TilePasses& passes,
                const ParallelFor& parallel_for) {
  RunUnits(problem, Units(problem, num_rows, false), passes, false, parallel_for);
}

void RunBackward(AttentionProblem problem, const PreparedBias& bias, int64_t num_rows, const TilePasses& passes,
                 const ParallelFor& parallel_for, const BiasGrads& bias_grads) {
  problem.bias_grads = !bias_grads.position_weights.empty() || !bias_grads.time_weights.empty();
  auto units = Units(problem, num_rows, true);
  const UnitGrads memory(problem, bias, &units);
  RunUnits(problem, units, passes, true, parallel_for);
  if (problem.query_grads != nullptr) AddQueryGrads(problem, units, parallel_for);
  if (problem.bias_grads) AddBiasGrads(problem, bias, units, bias_grads);
}

int64_t NumRows(const JaggedRows& rows) { return static_cast<int64_t>(rows.row_splits.size()) - 1; }

}  // namespace

void JaggedAttention(const JaggedRows& rows, const AttentionInputs& inputs, const RelativeBias& bias,
                     const TileEngine& engine, const ParallelFor& parallel_for, float* out) {
  const PreparedBias prepared(bias);
  AttentionProblem problem = ProblemOf(rows, inputs, prepared.tables());
  problem.out = out;
  RunForward(problem, NumRows(rows), engine.attention, parallel_for);
}

void GatedAttention(const JaggedRows& rows, const AttentionInputs& inputs, const GateInputs& gate,
                    const RelativeBias& bias, const TileEngine& engine, const ParallelFor& parallel_for,
                    float* attended, float* out) {
  const PreparedBias prepared(bias);
  AttentionProblem problem = ProblemOf(rows, inputs, prepared.tables());
  problem.out = attended;
  OutputGate output = OutputGateOf(rows.heads, inputs.value_dim, gate);
  output.attended = attended;
  output.result = out;
  const std::vector<AttentionUnit> units = Units(problem, NumRows(rows), false);
  GateAfterUnits after(problem, units, output, engine.gate);
  RunUnits(problem, units, engine.attention, false, parallel_for, [&](int32_t unit) { after.Done(unit); });
}

void JaggedAttentionGrad(const JaggedRows& rows, const AttentionInputs& inputs, const RelativeBias& bias,
                         const float* grads, const TileEngine& engine, const ParallelFor& parallel_for,
                         float* query_grads, float* key_grads, float* value_grads, const BiasGrads& bias_grads) {
  const PreparedBias prepared(bias);
  AttentionProblem problem = ProblemOf(rows, inputs, prepared.tables());
  problem.grads = grads;
  problem.query_grads = query_grads;
  problem.key_grads = key_grads;
  problem.value_grads = value_grads;
  RunBackward(problem, prepared, NumRows(rows), engine.attention, parallel_for, bias_grads);
}

void JaggedBiasAttention(const JaggedRows& rows, const float* value, int64_t value_dim, const RelativeBias& bias,
                         const TileEngine& engine, const ParallelFor& parallel_for, float* out) {
  const PreparedBias prepared(bias);
  AttentionProblem problem = ProblemOf(rows, prepared.tables());
  problem.value = value;
  problem.value_dim = value_dim;
  problem.out = out;
  RunForward(problem, NumRows(rows), engine.channels, parallel_for);
}

void JaggedBiasAttentionGrad(const JaggedRows& rows, const float* value, int64_t value_dim, const RelativeBias& bias,
                             const float* grads, const TileEngine& engine, const ParallelFor& parallel_for,
                             float* value_grads, const BiasGrads& bias_grads) {
  const PreparedBias prepared(bias);
  AttentionProblem problem = ProblemOf(rows, prepared.tables());
  problem.value = value;
  problem.value_dim = value_dim;
  problem.grads = grads;
  problem.value_grads = value_grads;
  RunBackward(problem, prepared, NumRows(rows), engine.channels, parallel_for, bias_grads);
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
