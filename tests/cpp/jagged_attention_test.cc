// Every engine that this processor can run, on one thread and on several, against the definitions in double, pair by
// pair. Rows of awkward lengths, head sizes that are no multiples of vectors, all masks, both parts of the bias.
#include "jagged_attention/jagged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "jagged_attention/bucket_cells.h"
#include "threads.h"

namespace fusedrec {
namespace {

struct Masks {
  int64_t context, window, full, targets;
};

constexpr int64_t kHeads = 3, kQkDim = 7, kValueDim = 18;
constexpr double kAlpha = 0.6;

struct Batch {
  std::vector<int64_t> splits = {0}, targets, asks, answers;
  std::vector<int64_t> thresholds = {2, 2, 9, 100, 101, 5000, int64_t{1} << 33};
  std::vector<float> query, key, value, grads, scale, position, time;
  int64_t longest = 1;

  Batch(const std::vector<int64_t>& lengths, const Masks& masks, bool far_times) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (const int64_t length : lengths) {
      splits.push_back(splits.back() + length);
      targets.push_back(std::min<int64_t>(masks.targets, length));
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
    fill(&scale, tokens);
    fill(&position, 2 * longest - 1);
    fill(&time, thresholds.size() + 1);
    for (int64_t t = 0; t < tokens; ++t) {
      answers.push_back(static_cast<int64_t>(random()) * (far_times ? (int64_t{1} << 29) : 1) % (int64_t{1} << 60));
      asks.push_back(answers.back() + random() % 12'000);
    }
  }
};

// The definitions, one pair after another; sums as many numbers in double.
struct Wanted {
  std::vector<double> out, query, key, value, position, time;

  Wanted(const Batch& b, const Masks& masks)
      : out(b.value.size()), query(b.query.size()), key(b.key.size()), value(b.value.size()),
        position(b.position.size()), time(b.time.size()) {
    for (size_t row = 0; row + 1 < b.splits.size(); ++row) {
      const int64_t begin = b.splits[row], length = b.splits[row + 1] - begin, targets = b.targets[row];
      const int64_t context = std::max<int64_t>(masks.context - 1, 0), top = length - targets - context;
      const auto number = [&](int64_t p) { return std::min(std::max<int64_t>(p - context, 0), top); };
      for (int64_t i = 0; i < length; ++i) {
        for (int64_t j = 0; j < length; ++j) {
          bool visible = i == j || number(i) > number(j);
          if (masks.window > 0) {
            visible &= number(i) - number(j) <= masks.window ||
                       (masks.full > 0 && number(i) >= top - masks.full);
          }
          if (masks.context > 0) visible |= number(i) == 0 && number(j) < top;
          if (!visible) continue;
          const int64_t place_i = std::min(i, length - targets), place_j = std::min(j, length - targets);
          const int64_t at = b.longest - 1 + place_j - place_i;
          const int64_t difference = std::llabs(b.asks[begin + i] - b.answers[begin + j]);
          const int64_t bucket = std::upper_bound(b.thresholds.begin(), b.thresholds.end(), difference) -
                                 b.thresholds.begin();
          for (int64_t h = 0; h < kHeads; ++h) Pair(b, begin + i, begin + j, h, at, bucket);
        }
      }
    }
  }

  void Pair(const Batch& b, int64_t i, int64_t j, int64_t h, int64_t at, int64_t bucket) {
    const int64_t qi = (i * kHeads + h) * kQkDim, kj = (j * kHeads + h) * kQkDim;
    const int64_t oi = (i * kHeads + h) * kValueDim, vj = (j * kHeads + h) * kValueDim;
    double x = b.position[at] + static_cast<double>(b.time[bucket]), grad = 0.0;
    for (int64_t d = 0; d < kQkDim; ++d) x += kAlpha * b.query[qi + d] * b.key[kj + d];
    const double sigmoid = 1.0 / (1.0 + std::exp(-x)), weight = x * sigmoid * b.scale[i];
    for (int64_t d = 0; d < kValueDim; ++d) {
      out[oi + d] += weight * b.value[vj + d];
      value[vj + d] += weight * b.grads[oi + d];
      grad += static_cast<double>(b.grads[oi + d]) * b.value[vj + d] * b.scale[i];
    }
    grad *= sigmoid * (1.0 + x * (1.0 - sigmoid));
    for (int64_t d = 0; d < kQkDim; ++d) {
      query[qi + d] += kAlpha * grad * b.key[kj + d];
      key[kj + d] += kAlpha * grad * b.query[qi + d];
    }
    position[at] += grad;
    time[bucket] += grad;
  }
};

void CheckClose(const std::vector<float>& got, const std::vector<double>& wanted, const char* what,
                const char* engine) {
  double most = 0.0;
  for (const double number : wanted) most = std::max(most, std::abs(number));
  for (size_t n = 0; n < wanted.size(); ++n) {
    // Sums of some hundred float32 products, relative to the largest entry.
    CHECK(std::abs(got[n] - wanted[n]) <= 1e-5 * most + 1e-9, "", what, "[", n, "] of ", engine, ": ", got[n],
          ", wanted ", wanted[n]);
  }
}

struct Found {
  std::vector<float> out, query, key, value, position, time;
};

Found Run(const Batch& b, const Masks& masks, const TileEngine& engine, const ParallelFor& parallel_for) {
  JaggedRows rows;
  rows.row_splits = b.splits;
  rows.num_targets = b.targets;
  rows.heads = kHeads;
  rows.contextual_length = masks.context;
  rows.attention_window = masks.window;
  rows.min_full_length = masks.full;
  const AttentionInputs inputs = {b.query.data(), b.key.data(), b.value.data(), kQkDim, kValueDim,
                                  static_cast<float>(kAlpha), b.scale, true};
  RelativeBias bias;
  bias.position_weights = b.position;
  bias.time = TimeMap::kBuckets;
  bias.time_weights = b.time;
  bias.thresholds = b.thresholds;
  bias.asks = b.asks;
  bias.answers = b.answers;
  Found found;
  found.out.resize(b.value.size());
  found.query.resize(b.query.size());
  found.key.resize(b.key.size());
  found.value.resize(b.value.size());
  found.position.resize(b.position.size());
  found.time.resize(b.time.size());
  JaggedAttention(rows, inputs, bias, engine, parallel_for, found.out.data());
  JaggedAttentionGrad(rows, inputs, bias, b.grads.data(), engine, parallel_for, found.query.data(), found.key.data(),
                      found.value.data(), {absl::MakeSpan(found.position), absl::MakeSpan(found.time)});
  return found;
}

void EveryEngine(const std::vector<int64_t>& lengths, const Masks& masks, bool far_times) {
  const Batch batch(lengths, masks, far_times);
  const Wanted wanted(batch, masks);
  for (const TileEngine* engine : Engines()) {
    const Found found = Run(batch, masks, *engine, SerialFor);
    CheckClose(found.out, wanted.out, "out", engine->name);
    CheckClose(found.query, wanted.query, "query_grads", engine->name);
    CheckClose(found.key, wanted.key, "key_grads", engine->name);
    CheckClose(found.value, wanted.value, "value_grads", engine->name);
    CheckClose(found.position, wanted.position, "position_grads", engine->name);
    CheckClose(found.time, wanted.time, "time_grads", engine->name);
    const Found threaded = Run(batch, masks, *engine, Threads(3));
    CHECK(threaded.out == found.out && threaded.query == found.query && threaded.key == found.key &&
              threaded.value == found.value && threaded.position == found.position && threaded.time == found.time,
          "", engine->name, ": other bits on three threads");
  }
}

// Cells find the bucket of every difference around every threshold, however near these lie.
void BucketsOfCells() {
  std::vector<int64_t> dense;
  for (int64_t b = 1; b < 3000; ++b) dense.push_back(b * b);
  for (const std::vector<int64_t>& thresholds :
       {dense, std::vector<int64_t>{}, std::vector<int64_t>{-5, 0, 1, 2, 3, 1 << 24, (1 << 24) + 1, INT32_MAX - 1},
        std::vector<int64_t>{int64_t{1} << 40}}) {
    const CellTable table(thresholds);
    const BucketCells cells = table.cells();
    std::vector<int64_t> differences = {0, 1, INT32_MAX - 1};
    for (const int64_t t : thresholds) differences.insert(differences.end(), {t - 1, t, t + 1});
    for (const int64_t difference : differences) {
      if (difference < 0 || difference >= INT32_MAX) continue;
      const float number = static_cast<float>(static_cast<int32_t>(difference));
      int32_t bits;
      std::memcpy(&bits, &number, sizeof(bits));
      int32_t bucket = cells.begin[std::min(bits >> cells.shift, cells.num_cells - 1)];
      for (int32_t probe = 0; probe < cells.probes; ++probe) bucket += difference >= cells.thresholds[bucket];
      const int64_t wanted = std::upper_bound(thresholds.begin(), thresholds.end(), difference) - thresholds.begin();
      CHECK_EQ(bucket, wanted, "difference ", difference);
    }
  }
}

}  // namespace
}  // namespace fusedrec

int main() {
  using namespace fusedrec;
  BucketsOfCells();
  const std::vector<int64_t> lengths = {5, 0, 63, 1, 65, 130};
  for (const Masks& masks : {Masks{0, 0, 0, 0}, Masks{0, 0, 0, 9}, Masks{3, 0, 0, 0}, Masks{2, 20, 5, 70}}) {
    EveryEngine(lengths, masks, false);
  }
  EveryEngine({40, 17}, {0, 0, 0, 3}, true);
  EveryEngine({600}, {2, 0, 0, 70}, false);  // several units of keys
  EveryEngine({}, {0, 0, 0, 0}, false);
}
