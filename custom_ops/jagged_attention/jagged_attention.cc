#include "jagged_attention/jagged_attention.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <numeric>

#include "jagged_attention/bucket_cells.h"

namespace fusedrec {
namespace {

// Queries of a forward unit.
constexpr int64_t kBlockQueries = 512;
// Keys of a backward unit: large enough that the gradients of queries which other units hold beside it stay few, and
// at most kMostBlocks per row, so that these are never more than a small multiple of the queries.
constexpr int64_t kBlockKeys = 512;
constexpr int64_t kMostBlocks = 8;
constexpr int64_t kShortRow = 128;

int64_t KeysPerUnit(int64_t length) {
  const int64_t keys = std::max(kBlockKeys, (length + kMostBlocks - 1) / kMostBlocks);
  return (keys + kTileKeys - 1) / kTileKeys * kTileKeys;
}

// A bias as the engine wants it, and the memory behind it.
class PreparedBias {
 public:
  explicit PreparedBias(const RelativeBias& bias) : bias_(bias), tables_{} {
    tables_.time = bias.time;
    tables_.asks = bias.asks.data();
    tables_.answers = bias.answers.data();
    if (!bias.position_weights.empty()) {
      position_.assign(bias.position_weights.rbegin(), bias.position_weights.rend());
      position_.resize(position_.size() + kPanel, 0.0f);
      tables_.position = position_.data();
      tables_.max_length = (static_cast<int64_t>(bias.position_weights.size()) + 1) / 2;
    }
    if (bias.time == TimeMap::kBuckets) {
      distinct_ = MakeDistinct(bias.thresholds);
      for (const int64_t bucket : distinct_.bucket) weights_.push_back(bias.time_weights[bucket]);
      cells_ = std::make_unique<CellTable>(distinct_.thresholds);
      tables_.weights = weights_.data();
      tables_.thresholds = distinct_.thresholds.data();
      tables_.num_thresholds = static_cast<int64_t>(distinct_.thresholds.size());
      tables_.cells = cells_->cells();
    } else {
      std::copy_n(bias.time_weights.begin(), NumTimeParameters(bias.time), tables_.parameters);
    }
  }

  const BiasTables& tables() const { return tables_; }

  // Numbers that a unit sums up for the time part.
  int64_t time_sums() const {
    return tables_.time == TimeMap::kBuckets ? tables_.num_thresholds + 1 : (tables_.time == TimeMap::kNone ? 0 : 3);
  }

  // The entry of time_weights that number n of these belongs to.
  int64_t TimeWeight(int64_t n) const { return tables_.time == TimeMap::kBuckets ? distinct_.bucket[n] : n; }

 private:
  const RelativeBias& bias_;
  BiasTables tables_;
  std::vector<float> position_, weights_;
  DistinctBuckets distinct_;
  std::unique_ptr<CellTable> cells_;
};

AttentionProblem ProblemOf(const JaggedRows& rows, const BiasTables& bias) {
  AttentionProblem problem{};
  problem.heads = rows.heads;
  problem.row_splits = rows.row_splits.data();
  problem.num_targets = rows.num_targets.empty() ? nullptr : rows.num_targets.data();
  problem.contextual_length = rows.contextual_length;
  problem.attention_window = rows.attention_window;
  problem.min_full_length = rows.min_full_length;
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

// A pair of one head costs 1; windows are taken into account, the rest of the masks hardly changes the order.
double Cost(const AttentionProblem& problem, const AttentionUnit& unit, int64_t length, bool queries) {
  double pairs = 0.0;
  const int64_t window = problem.attention_window > 0 ? problem.attention_window : length;
  for (int64_t place = unit.begin; place < unit.end; place += kPanel) {
    const int64_t reach = queries || problem.contextual_length > 0 ? place + kPanel : length - place;
    pairs += static_cast<double>(kPanel) * std::min(std::min(reach, length), window + kPanel);
  }
  return pairs * (unit.head_end - unit.head_begin);
}

// With a bias one unit does all heads: the bias of a tile is computed once for them. Units of short rows do, too: they
// read their tokens as they lie in memory.
int64_t HeadsPerUnit(const AttentionProblem& problem, int64_t length) {
  const bool biased = problem.bias.position != nullptr || problem.bias.time != TimeMap::kNone;
  return biased || length <= kShortRow ? problem.heads : 1;
}

// block: places per unit, of a row's length.
template <typename BlockOf>
std::vector<AttentionUnit> Units(const AttentionProblem& problem, int64_t num_rows, const BlockOf& block_of) {
  std::vector<AttentionUnit> units;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t length = problem.row_splits[row + 1] - problem.row_splits[row], block = block_of(length);
    const int64_t heads = HeadsPerUnit(problem, length);
    for (int64_t begin = 0; begin < length; begin += block) {
      for (int64_t head = 0; head < problem.heads; head += heads) {
        AttentionUnit unit{};
        unit.row = row;
        unit.head_begin = head;
        unit.head_end = head + heads;
        unit.begin = begin;
        unit.end = std::min(begin + block, length);
        units.push_back(unit);
      }
    }
  }
  return units;
}

// Runs all units, the costliest first; threads take the next one when they are done.
void RunUnits(const AttentionProblem& problem, const std::vector<AttentionUnit>& units, const TilePasses& passes,
              bool backward, const ParallelFor& parallel_for) {
  std::vector<double> cost(units.size());
  int64_t floats = 0;
  for (size_t u = 0; u < units.size(); ++u) {
    const int64_t row = units[u].row, length = problem.row_splits[row + 1] - problem.row_splits[row];
    cost[u] = Cost(problem, units[u], length, !backward);
    floats = std::max(floats, passes.scratch_floats(problem, backward, units[u].end - units[u].begin,
                                                     units[u].head_end - units[u].head_begin));
  }
  std::vector<int32_t> order(units.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return cost[a] > cost[b]; });
  std::atomic<size_t> next{0};
  constexpr int64_t kOwnShare = 1 << 30;  // every thread that comes is welcome
  parallel_for(static_cast<int64_t>(units.size()), kOwnShare, [&](int64_t, int64_t) {
    size_t taken = next++;
    if (taken >= units.size()) return;
    constexpr int64_t kAlign = 16;  // floats in a cache line
    std::vector<float> memory(floats + kAlign);
    const auto address = reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float);
    float* scratch = memory.data() + (kAlign - address % kAlign) % kAlign;
    for (; taken < units.size(); taken = next++) {
      (backward ? passes.backward : passes.forward)(problem, units[order[taken]], scratch);
    }
  });
}

void RunForward(const AttentionProblem& problem, int64_t num_rows, const TilePasses& passes,
                const ParallelFor& parallel_for) {
  const auto units = Units(problem, num_rows, [](int64_t) { return kBlockQueries; });
  RunUnits(problem, units, passes, false, parallel_for);
}

// Gradients that units of a backward pass hold until they are added up.
class UnitGrads {
 public:
  UnitGrads(const AttentionProblem& problem, const PreparedBias& bias, std::vector<AttentionUnit>* units) {
    // First all sizes, then the memory, then the places in it.
    std::vector<std::array<int64_t, 3>> at(units->size());
    int64_t floats = 0;
    for (size_t u = 0; u < units->size(); ++u) {
      AttentionUnit& unit = (*units)[u];
      const int64_t length = Length(problem, unit);
      unit.query_begin = problem.contextual_length > 0 ? 0 : unit.begin / kPanel * kPanel;
      const int64_t queries = length - unit.query_begin;
      const int64_t sizes[3] = {
          unit.begin == 0 ? 0 : queries * (unit.head_end - unit.head_begin) * problem.qk_dim,
          problem.bias_grads && problem.bias.position != nullptr ? PositionSums(problem, unit) + kPanel : 0,
          problem.bias_grads ? bias.time_sums() : 0};
      for (int part = 0; part < 3; ++part) {
        at[u][part] = sizes[part] == 0 ? -1 : floats;
        floats += sizes[part];
      }
    }
    memory_.resize(floats, 0.0f);
    for (size_t u = 0; u < units->size(); ++u) {
      const auto place = [&](int part) { return at[u][part] < 0 ? nullptr : memory_.data() + at[u][part]; };
      (*units)[u].query_grads = place(0);
      (*units)[u].position_grads = place(1);
      (*units)[u].time_grads = place(2);
    }
  }

  static int64_t Length(const AttentionProblem& problem, const AttentionUnit& unit) {
    return problem.row_splits[unit.row + 1] - problem.row_splits[unit.row];
  }

  static int64_t PositionSums(const AttentionProblem& problem, const AttentionUnit& unit) {
    return Length(problem, unit) - unit.begin + unit.end - unit.query_begin;
  }

 private:
  std::vector<float> memory_;
};

// Units of a row lie together, in the order of their keys.
void AddQueryGrads(const AttentionProblem& problem, const std::vector<AttentionUnit>& units,
                   const ParallelFor& parallel_for) {
  std::vector<size_t> row_begin;
  for (size_t u = 0; u < units.size(); ++u) {
    if (u == 0 || units[u].row != units[u - 1].row) row_begin.push_back(u);
  }
  row_begin.push_back(units.size());
  parallel_for(static_cast<int64_t>(row_begin.size()) - 1, 1 << 20, [&](int64_t first, int64_t last) {
    for (size_t u = row_begin[first]; u < row_begin[last]; ++u) {
      const AttentionUnit& unit = units[u];
      if (unit.query_grads == nullptr) continue;
      const int64_t columns = (unit.head_end - unit.head_begin) * problem.qk_dim;
      const int64_t stride = problem.heads * problem.qk_dim;
      const float* part = unit.query_grads;
      float* sum = problem.query_grads + (problem.row_splits[unit.row] + unit.query_begin) * stride +
                   unit.head_begin * problem.qk_dim;
      for (int64_t i = unit.query_begin; i < UnitGrads::Length(problem, unit); ++i, sum += stride, part += columns) {
        for (int64_t c = 0; c < columns; ++c) sum[c] += part[c];
      }
    }
  });
}

void AddBiasGrads(const AttentionProblem& problem, const PreparedBias& bias, const std::vector<AttentionUnit>& units,
                  const BiasGrads& grads) {
  std::vector<double> position(grads.position_weights.size()), time(bias.time_sums());
  for (const AttentionUnit& unit : units) {
    if (unit.position_grads != nullptr) {
      // Sum n is of asking - answering = n - (end - 1 - query_begin).
      const int64_t distance = unit.query_begin - unit.end + 1;
      for (int64_t n = 0; n < UnitGrads::PositionSums(problem, unit); ++n) {
        const int64_t weight = problem.bias.max_length - 1 - (n + distance);
        if (0 <= weight && weight < static_cast<int64_t>(position.size())) position[weight] += unit.position_grads[n];
      }
    }
    for (size_t n = 0; unit.time_grads != nullptr && n < time.size(); ++n) time[n] += unit.time_grads[n];
  }
  std::copy(position.begin(), position.end(), grads.position_weights.begin());
  std::fill(grads.time_weights.begin(), grads.time_weights.end(), 0.0f);
  for (size_t n = 0; n < time.size(); ++n) {
    const size_t weight = bias.TimeWeight(n);
    if (weight < grads.time_weights.size()) grads.time_weights[weight] = static_cast<float>(time[n]);
  }
}

void RunBackward(AttentionProblem problem, const PreparedBias& bias, int64_t num_rows, const TilePasses& passes,
                 const ParallelFor& parallel_for, const BiasGrads& bias_grads) {
  problem.bias_grads = !bias_grads.position_weights.empty() || !bias_grads.time_weights.empty();
  auto units = Units(problem, num_rows, KeysPerUnit);
  const UnitGrads memory(problem, bias, &units);
  RunUnits(problem, units, passes, true, parallel_for);
  if (problem.query_grads != nullptr) AddQueryGrads(problem, units, parallel_for);
  if (problem.bias_grads) AddBiasGrads(problem, bias, units, bias_grads);
}

int64_t NumRows(const JaggedRows& rows) { return static_cast<int64_t>(rows.row_splits.size()) - 1; }

}  // namespace

int NumTimeParameters(TimeMap map) {
  switch (map) {
    case TimeMap::kPower:
    case TimeMap::kExponential: return 2;
    case TimeMap::kStretched: return 3;
    default: return 0;
  }
}

void JaggedAttention(const JaggedRows& rows, const AttentionInputs& inputs, const RelativeBias& bias,
                     const TileEngine& engine, const ParallelFor& parallel_for, float* out) {
  const PreparedBias prepared(bias);
  AttentionProblem problem = ProblemOf(rows, inputs, prepared.tables());
  problem.out = out;
  RunForward(problem, NumRows(rows), engine.attention, parallel_for);
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
