// Every engine that this processor can run, on one thread and on several, against the definitions in double, pair by
// pair. Rows of awkward lengths, head sizes that are no multiples of vectors, all masks, both parts of the bias.
#include "jagged_attention/cpu/jagged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "jagged_attention/cpu/bucket_cells.h"
#include "jagged_batch.h"
#include "threads.h"

namespace fusedrec {
namespace {

constexpr double kAlpha = 0.6;

// The definitions, one pair after another; sums as many numbers in double.
struct Wanted {
  std::vector<double> out, query, key, value, position, time;
  double summed = 0.0;  // of the magnitudes in position and time

  Wanted(const Batch& b, const Masks& masks)
      : out(b.value.size()), query(b.query.size()), key(b.key.size()), value(b.value.size()),
        position(b.position.size()), time(b.time.size()) {
    b.EachPair(masks, [&](int64_t i, int64_t j, int64_t at, int64_t bucket) {
      for (int64_t h = 0; h < kHeads; ++h) Pair(b, i, j, h, at, bucket);
    });
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
    summed += std::abs(grad);
  }
};

struct Found {
  std::vector<float> out, query, key, value, position, time;
};

Found Run(const Batch& b, const Masks& masks, const TileEngine& engine, const ParallelFor& parallel_for,
          absl::Span<const int64_t> query_splits = {}) {
  JaggedRows rows = b.Rows(masks);
  rows.query_splits = query_splits;
  const AttentionInputs inputs = {b.query.data(), b.key.data(), b.value.data(), kQkDim, kValueDim,
                                  static_cast<float>(kAlpha), b.scale, true};
  const RelativeBias bias = b.Bias();
  Found found;
  found.out.resize(b.grads.size());
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
    CheckClose(found.position, wanted.position, "position_grads", engine->name, wanted.summed);
    CheckClose(found.time, wanted.time, "time_grads", engine->name, wanted.summed);
    const Found threaded = Run(batch, masks, *engine, Threads(3));
    CHECK(threaded.out == found.out && threaded.query == found.query && threaded.key == found.key &&
              threaded.value == found.value && threaded.position == found.position && threaded.time == found.time,
          "", engine->name, ": other bits on three threads");
  }
}

// The last tokens of each row ask: their outputs have the bits of a call in which every token asks, and the gradients are
// those of a call in which the others have no gradient.
void FewerQueries(const std::vector<int64_t>& queries, const Masks& masks) {
  Batch whole({130, 70, 0, 600, 65}, masks, false), fewer = whole;
  std::vector<int64_t> splits = {0}, asking;
  for (size_t row = 0; row < queries.size(); ++row) {
    splits.push_back(splits.back() + queries[row]);
    for (int64_t t = whole.splits[row]; t < whole.splits[row + 1]; ++t) {
      if (t >= whole.splits[row + 1] - queries[row]) {
        asking.push_back(t);
        continue;
      }
      std::fill_n(whole.grads.begin() + t * kHeads * kValueDim, kHeads * kValueDim, 0.0f);
    }
  }
  const auto asked = [&](const auto& from, int64_t width) {
    auto to = from;
    to.clear();
    for (const int64_t t : asking) to.insert(to.end(), from.begin() + t * width, from.begin() + (t + 1) * width);
    return to;
  };
  fewer.query = asked(whole.query, kHeads * kQkDim);
  fewer.grads = asked(whole.grads, kHeads * kValueDim);
  fewer.scale = asked(whole.scale, 1);
  fewer.asks = asked(whole.asks, 1);
  const Wanted wanted(whole, masks);
  for (const TileEngine* engine : Engines()) {
    const Found all = Run(whole, masks, *engine, SerialFor), found = Run(fewer, masks, *engine, Threads(3), splits);
    CHECK(found.out == asked(all.out, kHeads * kValueDim), "", engine->name, ": other bits than those of whole rows");
    CheckClose(found.query, asked(wanted.query, kHeads * kQkDim), "query_grads", engine->name);
    CheckClose(found.key, wanted.key, "key_grads", engine->name);
    CheckClose(found.value, wanted.value, "value_grads", engine->name);
    CheckClose(found.position, wanted.position, "position_grads", engine->name, wanted.summed);
    CheckClose(found.time, wanted.time, "time_grads", engine->name, wanted.summed);
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

TEST(jagged_attention) {
  using namespace fusedrec;
  EveryEngine({40, 17}, {0, 0, 0, 3}, true);
  EveryEngine({600}, {2, 0, 0, 70}, false);  // several units of keys
  EveryEngine({}, {0, 0, 0, 0}, false);
  FewerQueries({130, 70, 0, 71, 65}, {2, 20, 5, 65, 3});
  if (kRacesAlone) return;
  BucketsOfCells();
  for (const Masks& masks : AllMasks()) EveryEngine(AwkwardLengths(), masks, false);
  EveryEngine({40, 700}, {0, INT64_MAX, 0, 3}, false);  // a window without an end
  EveryEngine({40, 700}, {2, 5, INT64_MAX - 700, 3}, false);
  EveryEngine({40, 700}, {2, 5, 0, 3, 1, INT64_MAX}, false);  // all history
  for (const Masks& masks : AllMasks()) {
    if (masks.targets <= 9) FewerQueries({31, 70, 0, 100, 9}, masks);
  }
  FewerQueries({0, 0, 0, 530, 1}, {3, 0, 0, 0});
  FewerQueries({130, 70, 0, 600, 65}, {0, 0, 0, 9});
}
