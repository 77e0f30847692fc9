// Rows of one panel without a bias have a way of their own. A bias of zeros sends the same rows the long way, which
// jagged_attention_test.cc holds against the definitions: both must agree, for all masks, engines and threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "jagged_attention/cpu/jagged_attention.h"
#include "threads.h"

namespace fusedrec {
namespace {

constexpr int64_t kHeads = 3, kQkDim = 16, kValueDim = 32, kLongest = 64;
// Fewer than a vector of floats, and beside the edges of one to four vectors.
constexpr int64_t kLengths[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, kLongest};

struct Tokens {
  std::vector<int64_t> splits = {0}, targets;
  std::vector<float> query, key, value, grads, scale;

  explicit Tokens(int64_t most_targets) {
    for (const int64_t length : kLengths) {
      splits.push_back(splits.back() + length);
      targets.push_back(std::min(length, most_targets));
    }
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>* numbers, int64_t columns) {
      numbers->resize(splits.back() * columns);
      for (float& number : *numbers) number = normal(random);
    };
    fill(&query, kHeads * kQkDim);
    fill(&key, kHeads * kQkDim);
    fill(&value, kHeads * kValueDim);
    fill(&grads, kHeads * kValueDim);
    fill(&scale, 1);
  }
};

struct Results {
  std::vector<float> out, query, key, value;
};

Results Run(const Tokens& t, JaggedRows rows, bool scale_per_token, const std::vector<float>& position,
            const TileEngine& engine, const ParallelFor& parallel_for) {
  rows.row_splits = t.splits;
  rows.num_targets = t.targets;
  rows.heads = kHeads;
  const AttentionInputs inputs = {
      t.query.data(), t.key.data(), t.value.data(), kQkDim, kValueDim, 0.3f,
      absl::MakeConstSpan(t.scale).subspan(0, scale_per_token ? t.scale.size() : 1), scale_per_token};
  RelativeBias bias;
  bias.position_weights = position;
  // An output that is not written keeps an impossible value.
  const auto unset = [](size_t size) { return std::vector<float>(size, 1e30f); };
  Results r = {unset(t.value.size()), unset(t.query.size()), unset(t.key.size()), unset(t.value.size())};
  JaggedAttention(rows, inputs, bias, engine, parallel_for, r.out.data());
  JaggedAttentionGrad(rows, inputs, bias, t.grads.data(), engine, parallel_for, r.query.data(), r.key.data(),
                      r.value.data(), BiasGrads());
  return r;
}

void CheckClose(const std::vector<float>& got, const std::vector<float>& wanted) {
  CHECK(got.size() == wanted.size());
  for (size_t n = 0; n < got.size(); ++n) CHECK(std::abs(got[n] - wanted[n]) <= 1e-4f * (1.0f + std::abs(wanted[n])));
}

void CheckMasks(int64_t targets, int64_t context, int64_t window, int64_t full, bool scale_per_token) {
  JaggedRows rows;
  rows.attention_window = window;
  rows.min_full_length = full;
  const Tokens tokens(targets);
  const std::vector<int64_t> contexts(tokens.splits.size() - 1, context);
  if (context > 0) rows.contextual_lengths = contexts;
  const std::vector<float> zeros(2 * kLongest - 1);
  for (const TileEngine* engine : Engines()) {
    const Results found = Run(tokens, rows, scale_per_token, {}, *engine, SerialFor);
    const Results threaded = Run(tokens, rows, scale_per_token, {}, *engine, Threads(3));
    const Results wanted = Run(tokens, rows, scale_per_token, zeros, *engine, SerialFor);
    for (const auto part : {&Results::out, &Results::query, &Results::key, &Results::value}) {
      CheckClose(found.*part, wanted.*part);
      CHECK(found.*part == threaded.*part);
    }
  }
}

}  // namespace
}  // namespace fusedrec

TEST(jagged_short) {
  fusedrec::CheckMasks(0, 0, 0, 0, false);
  fusedrec::CheckMasks(0, 0, 0, 0, true);
  fusedrec::CheckMasks(40, 0, 0, 0, true);
  fusedrec::CheckMasks(0, 0, 5, 0, true);
  fusedrec::CheckMasks(3, 0, 2, 7, false);
  fusedrec::CheckMasks(0, 4, 0, 0, true);
  fusedrec::CheckMasks(2, 6, 3, 5, true);
}
