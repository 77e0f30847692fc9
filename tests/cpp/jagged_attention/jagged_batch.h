// Rows, tokens and weights of a bias that the tests of jagged attention compute with, and who sees whom in them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#include "check.h"
#include "jagged_attention/cpu/jagged_attention.h"

namespace fusedrec {

constexpr int64_t kHeads = 3, kQkDim = 7, kValueDim = 18;

struct Masks {
  int64_t context, window, full, targets;
  int64_t group = 1, global = 0;
};

struct Batch {
  std::vector<int64_t> splits = {0}, targets, contexts, asks, answers;
  std::vector<int64_t> thresholds = {2, 2, 9, 100, 101, 5000, int64_t{1} << 33};
  std::vector<float> query, key, value, grads, channel_grads, scale, position, time;
  int64_t longest = 1;

  Batch(const std::vector<int64_t>& lengths, const Masks& masks, bool far_times) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (const int64_t length : lengths) {
      splits.push_back(splits.back() + length);
      targets.push_back(std::min<int64_t>(masks.targets, length));
      // One row without context among those that have it.
      contexts.push_back(contexts.size() == 2 ? 0 : masks.context);
      longest = std::max(longest, length);
    }
    const auto fill = [&](std::vector<float>* numbers, int64_t n) {
      numbers->resize(n);
      for (float& number : *numbers) number = normal(random) * 0.6f;
    };
    const int64_t tokens = splits.back();
    fill(&query, tokens * kHeads * kQkDim);
    fill(&key, tokens * kHeads * kQkDim);
    fill(&value, tokens * kHeads * kValueDim);
    fill(&grads, tokens * kHeads * kValueDim);
    fill(&channel_grads, tokens * kHeads * 2 * kValueDim);
    fill(&scale, tokens);
    fill(&position, 2 * longest - 1);
    fill(&time, thresholds.size() + 1);
    for (int64_t t = 0; t < tokens; ++t) {
      answers.push_back(static_cast<int64_t>(random()) * (far_times ? (int64_t{1} << 29) : 1) % (int64_t{1} << 60));
      asks.push_back(answers.back() + random() % 12'000);
    }
  }

  // Calls visit(asking token, answering token, entry of position, bucket) for all pairs that see each other.
  template <typename Visit>
  void EachPair(const Masks& masks, const Visit& visit) const {
    for (size_t row = 0; row + 1 < splits.size(); ++row) {
      const int64_t begin = splits[row], length = splits[row + 1] - begin;
      const int64_t context = std::max<int64_t>(contexts[row] - 1, 0), top = length - targets[row] - context;
      const auto number = [&](int64_t p) { return std::min(std::max<int64_t>(p - context, 0), top); };
      const auto place = [&](int64_t p) { return std::min(p, length - targets[row]); };
      for (int64_t i = 0; i < length; ++i) {
        for (int64_t j = 0; j < length; ++j) {
          bool visible = i == j || number(i) > number(j);
          if (masks.window > 0) {
            const bool first = masks.global > 0 && (j < contexts[row] || j - contexts[row] < masks.global);
            const bool newest = masks.full > 0 && number(i) >= top - masks.full;
            visible &= number(i) - number(j) <= masks.window || newest || first;
          }
          if (contexts[row] > 0) visible |= number(i) == 0 && number(j) < top;
          const int64_t history = length - targets[row];
          visible |= j >= history && i > j && (i - history) / masks.group == (j - history) / masks.group;
          if (!visible) continue;
          const int64_t difference = std::llabs(asks[begin + i] - answers[begin + j]);
          visit(begin + i, begin + j, longest - 1 + place(j) - place(i),
                std::upper_bound(thresholds.begin(), thresholds.end(), difference) - thresholds.begin());
        }
      }
    }
  }

  JaggedRows Rows(const Masks& masks) const {
    JaggedRows rows;
    rows.row_splits = splits;
    rows.num_targets = targets;
    rows.heads = kHeads;
    if (masks.context > 0) rows.contextual_lengths = contexts;
    rows.target_group_size = masks.group;
    rows.attention_window = masks.window;
    rows.min_full_length = masks.full;
    rows.global_window = masks.global;
    return rows;
  }

  RelativeBias Bias() const {
    RelativeBias bias;
    bias.position_weights = position;
    bias.time = TimeMap::kBuckets;
    bias.time_weights = time;
    bias.thresholds = thresholds;
    bias.asks = asks;
    bias.answers = answers;
    return bias;
  }
};

// summed: the magnitudes of all numbers that went into one entry, for sums in which these cancel.
inline void CheckClose(const std::vector<float>& got, const std::vector<double>& wanted, const char* what,
                       const char* engine, double summed = 0.0) {
  double most = 0.0;
  for (const double number : wanted) most = std::max(most, std::abs(number));
  // Sums of some hundred float32 products, relative to the largest entry; of 10^5 and more, to what was summed.
  const double limit = 1e-5 * most + 1e-8 * summed + 1e-9;
  for (size_t n = 0; n < wanted.size(); ++n) {
    CHECK(std::abs(got[n] - wanted[n]) <= limit, "", what, "[", n, "] of ", engine, ": ", got[n], ", wanted ",
          wanted[n], ", limit ", limit);
  }
}

inline const std::vector<int64_t>& AwkwardLengths() {
  static const std::vector<int64_t> lengths = {5, 0, 63, 1, 65, 130};
  return lengths;
}

inline std::vector<Masks> AllMasks() {
  return {{0, 0, 0, 0}, {0, 0, 0, 9}, {3, 0, 0, 0}, {2, 20, 5, 70, 3}, {0, 9, 0, 3, 1, 5}, {3, 20, 2, 9, 2, 30}};
}

}  // namespace fusedrec
