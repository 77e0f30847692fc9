#include "jagged_attention/cpu/unit_grads.h"

#include <algorithm>
#include <array>

#include "jagged_attention/cpu/units.h"

namespace fusedrec {
namespace {

// Distances between queries and keys of a unit, one number each.
int64_t PositionSums(const AttentionProblem& problem, const AttentionUnit& unit) {
  return RowLength(problem, unit.row) - unit.begin + unit.end - unit.query_begin;
}

}  // namespace

UnitGrads::UnitGrads(const AttentionProblem& problem, const PreparedBias& bias, std::vector<AttentionUnit>* units) {
  std::vector<std::array<int64_t, 3>> at(units->size());
  int64_t floats = 0;
  for (size_t u = 0; u < units->size(); ++u) {
    const AttentionUnit& unit = (*units)[u];
    const int64_t queries = RowLength(problem, unit.row) - unit.query_begin;
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
      const int64_t first = problem.query_splits[unit.row] - FirstQuery(problem, unit.row);
      float* sum = problem.query_grads + (first + unit.query_begin) * stride + unit.head_begin * problem.qk_dim;
      for (int64_t i = unit.query_begin; i < RowLength(problem, unit.row); ++i, sum += stride, part += columns) {
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
      // Sum n belongs to asking - answering = n - (end - 1 - query_begin).
      const int64_t distance = unit.query_begin - unit.end + 1;
      for (int64_t n = 0; n < PositionSums(problem, unit); ++n) {
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

}  // namespace fusedrec
