#include "jagged_attention/cpu/jagged_attention.h"

#include <array>
#include <atomic>
#include <numeric>

#include "jagged_attention/cpu/prepared_bias.h"

namespace fusedrec {
namespace {

#include "jagged_attention/visibility.inc.h"

// How the work of an op is cut into units, and who does them.

constexpr int64_t kBlockQueries = 512;
// Forward units of a row with fewer queries than keys, so that several threads share the queries of one user.
constexpr int64_t kMostQueryBlocks = 8;
// Keys of a backward unit. It is large enough that other units hold few gradients of queries beside it. A row has at
// most kMostBlocks units, so these gradients are never more than a small multiple of the queries.
constexpr int64_t kBlockKeys = 512;
constexpr int64_t kMostBlocks = 8;
// Rows of up to so many tokens are done by one unit, all heads together.
constexpr int64_t kShortRow = 128;

int64_t KeysPerUnit(int64_t length) {
  const int64_t keys = std::max(kBlockKeys, (length + kMostBlocks - 1) / kMostBlocks);
  return (keys + kTileKeys - 1) / kTileKeys * kTileKeys;
}

int64_t QueriesPerUnit(int64_t queries, int64_t length) {
  if (queries == length) return kBlockQueries;
  const int64_t block = (queries + kMostQueryBlocks - 1) / kMostQueryBlocks;
  return std::clamp((block + kPanel - 1) / kPanel * kPanel, kPanel, kBlockQueries);
}

// Returns where the queries of a forward unit from `begin` on end. With fewer queries than keys, no unit has targets and
// other queries: all targets of a panel have one place and often one time, so that the bias of a key is computed once.
int64_t QueriesEnd(const AttentionProblem& problem, int64_t row, int64_t begin, int64_t block) {
  const int64_t length = RowLength(problem, row), end = std::min(begin + block, length);
  if (problem.num_targets == nullptr || FirstQuery(problem, row) == 0) return end;
  const int64_t targets_from = length - problem.num_targets[row];
  return begin < targets_from ? std::min(end, targets_from) : end;
}

bool HasContext(const AttentionProblem& problem, int64_t row) {
  return problem.contextual_lengths != nullptr && problem.contextual_lengths[row] > 0;
}

// A pair of one head costs 1; windows are taken into account, the rest of the masks hardly changes the order.
double Cost(const AttentionProblem& problem, const AttentionUnit& unit, int64_t length, bool queries) {
  double pairs = 0.0;
  // The windows may be any numbers, and no row reaches further than its length.
  const int64_t window = problem.attention_window > 0 ? std::min(problem.attention_window, length) : length;
  const int64_t global = std::min(problem.global_window, length);
  for (int64_t place = unit.begin; place < unit.end; place += kPanel) {
    const int64_t reach = queries || HasContext(problem, unit.row) ? place + kPanel : length - place;
    const int64_t near = window + kPanel + (queries || place < global ? global : 0);
    pairs += static_cast<double>(std::min(kPanel, unit.end - place)) * std::min(std::min(reach, length), near);
  }
  return pairs * (unit.head_end - unit.head_begin);
}

// With a bias one unit does all heads: the bias of a tile is computed once for them. Units of short rows do, too: they
// read their tokens as they lie in memory.
int64_t HeadsPerUnit(const AttentionProblem& problem, int64_t length) {
  const bool biased = problem.tables.position != nullptr || problem.tables.time != TimeMap::kNone;
  return biased || length <= kShortRow ? problem.heads : 1;
}

// Distances between queries and keys of a unit, one number each.
int64_t PositionSums(const AttentionProblem& problem, const AttentionUnit& unit) {
  return RowLength(problem, unit.row) - unit.begin + unit.end - unit.query_begin;
}

// Units of one pass, row by row, in the order of their places; without memory for gradients. They depend on the rows
// alone, not on the threads.
std::vector<AttentionUnit> Units(const AttentionProblem& problem, bool backward) {
  std::vector<AttentionUnit> units;
  for (int64_t row = 0; row < problem.batch; ++row) {
    const int64_t length = RowLength(problem, row), first_query = FirstQuery(problem, row);
    const int64_t block = backward ? KeysPerUnit(length) : QueriesPerUnit(length - first_query, length);
    const int64_t heads = HeadsPerUnit(problem, length);
    for (int64_t begin = backward ? 0 : first_query, end; begin < length; begin = end) {
      end = backward ? std::min(begin + block, length) : QueriesEnd(problem, row, begin, block);
      for (int64_t head = 0; head < problem.heads; head += heads) {
        AttentionUnit unit{};
        unit.row = row;
        unit.head_begin = head;
        unit.head_end = head + heads;
        unit.begin = begin;
        unit.end = end;
        // Only context tokens see tokens after them.
        unit.query_begin = HasContext(problem, row) ? first_query : std::max(begin, first_query);
        units.push_back(unit);
      }
    }
  }
  return units;
}

// Runs all units, the costliest first; threads take the next one when they are done. The thread of a unit calls `after`
// with its number.
void RunUnits(const AttentionProblem& problem, const std::vector<AttentionUnit>& units, const TilePasses& passes,
              bool backward, const ParallelFor& parallel_for, const std::function<void(int32_t)>& after = {}) {
  std::vector<double> cost(units.size());
  int64_t floats = 0;
  for (size_t u = 0; u < units.size(); ++u) {
    const int64_t row = units[u].row, length = RowLength(problem, row);
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
    const std::unique_ptr<float[]> memory(new float[floats + kAlign]);
    const auto address = reinterpret_cast<uintptr_t>(memory.get()) / sizeof(float);
    float* scratch = memory.get() + (kAlign - address % kAlign) % kAlign;
    for (; taken < units.size(); taken = next++) {
      (backward ? passes.backward : passes.forward)(problem, units[order[taken]], scratch);
      if (after) after(order[taken]);
    }
  });
}

// Gradients that several units of a backward pass share: each unit has its own part.
class UnitGrads {
 public:
  // Gives each unit its memory, all zeros. The first unit of a row writes the gradients of its queries where they
  // belong; the others, to memory of their own.
  UnitGrads(const AttentionProblem& problem, const PreparedBias& bias, std::vector<AttentionUnit>* units) {
    std::vector<std::array<int64_t, 3>> at(units->size());
    int64_t floats = 0;
    for (size_t u = 0; u < units->size(); ++u) {
      const AttentionUnit& unit = (*units)[u];
      const int64_t queries = RowLength(problem, unit.row) - unit.query_begin;
      const int64_t sizes[3] = {unit.begin == 0 ? 0 : queries * (unit.head_end - unit.head_begin) * problem.qk_dim,
          problem.tables.position != nullptr ? PositionSums(problem, unit) + kPanel : 0, bias.time_sums()};
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

 private:
  std::vector<float> memory_;
};

// Adds the parts of the units, in their order.
void AddQueryGrads(const AttentionProblem& problem, const std::vector<AttentionUnit>& units,
                   const ParallelFor& parallel_for) {
  // Units of a row lie together, in the order of their keys.
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
      float* sum = problem.query_grads + (QueryStart(problem, unit.row) + unit.query_begin) * stride + unit.head_begin * problem.qk_dim;
      for (int64_t i = unit.query_begin; i < RowLength(problem, unit.row); ++i, sum += stride, part += columns) {
        for (int64_t c = 0; c < columns; ++c) sum[c] += part[c];
      }
    }
  });
}

void AddBiasGrads(const AttentionProblem& problem, const PreparedBias& bias, const std::vector<AttentionUnit>& units) {
  const int64_t size = problem.tables.position == nullptr ? 0 : 2 * problem.bias.max_length - 1;
  std::vector<double> position(size), time(bias.time_sums());
  for (const AttentionUnit& unit : units) {
    if (unit.position_grads != nullptr) {
      // Sum n belongs to asking - answering = n - (end - 1 - query_begin).
      const int64_t distance = unit.query_begin - unit.end + 1;
      for (int64_t n = 0; n < PositionSums(problem, unit); ++n) {
        const int64_t weight = problem.bias.max_length - 1 - (n + distance);
        if (0 <= weight && weight < size) position[weight] += unit.position_grads[n];
      }
    }
    for (size_t n = 0; n < time.size(); ++n) time[n] += unit.time_grads[n];
  }
  std::copy(position.begin(), position.end(), problem.position_grads);
  const int64_t weights = NumTimeWeights(problem.bias);
  std::fill_n(problem.time_grads, weights, 0.0f);
  for (size_t n = 0; n < time.size(); ++n) {
    const int64_t weight = bias.TimeWeight(n);
    if (weight < weights) problem.time_grads[weight] = static_cast<float>(time[n]);
  }
}

constexpr int64_t kChunkTokens = 256;  // of the sums for the norm's weights, whatever the number of threads

// Gates the queries of forward units. The last unit of the same queries does it, because a norm needs all heads.
class GateAfterUnits {
 public:
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
