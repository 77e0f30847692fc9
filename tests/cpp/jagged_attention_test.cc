// Every engine that this processor can run against the best one, which tests/ops holds against its oracle: attention, gate
// and channels, both passes, on one thread and on three. Rows of awkward lengths, all masks, both parts of the bias.
#include "jagged_attention/cpu/jagged_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "jagged_attention/cpu/prepared_bias.h"
#include "threads.h"

namespace fusedrec {
namespace {

constexpr int64_t kHeads = 3;

struct Masks {
  int64_t context = 0, window = 0, full = 0, targets = 0, group = 1, global = 0;
};

struct Form {
  int64_t qk_dim = 7, value_dim = 18;  // no multiples of a vector
  bool position = true, time = true, far_times = false, gate = false, channels = false;
  bool norm = false, per_head = false, gate_first = false;
};

using Floats = std::vector<float>;

// Inputs of a call, and its results. A result that is not written keeps an impossible value.
struct Batch {
  Form form;
  std::vector<int64_t> splits = {0}, query_splits = {0}, targets, contexts, asks, answers;
  std::vector<int64_t> thresholds = {2, 2, 9, 100, 101, 5000, int64_t{1} << 33};
  Floats query, key, value, grads, scale, position, time, gate, norm_weight, norm_bias;
  Floats out, gated, query_grads, key_grads, value_grads, gate_grads, position_grads, time_grads, weight_grads, bias_grads;
  AttentionCall<float> call{};

  // queries: of the last tokens of each row; empty: all.
  Batch(const std::vector<int64_t>& lengths, const Masks& masks, const Form& of, const std::vector<int64_t>& queries = {})
      : form(of) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    int64_t longest = 1;
    for (size_t b = 0; b < lengths.size(); ++b) {
      splits.push_back(splits.back() + lengths[b]);
      query_splits.push_back(query_splits.back() + (queries.empty() ? lengths[b] : queries[b]));
      targets.push_back(std::min(masks.targets, queries.empty() ? lengths[b] : queries[b]));
      contexts.push_back(b == 2 ? 0 : masks.context);  // one row without context among those that have it
      longest = std::max(longest, lengths[b]);
    }
    const auto fill = [&](Floats* numbers, int64_t n) {
      numbers->resize(n);
      for (float& number : *numbers) number = normal(random) * 0.6f;
    };
    const int64_t tokens = splits.back(), columns = kHeads * form.value_dim;
    const int64_t out_columns = columns * (form.channels ? form.position + form.time : 1);
    fill(&query, tokens * kHeads * form.qk_dim);
    fill(&key, tokens * kHeads * form.qk_dim);
    fill(&value, tokens * columns);
    fill(&grads, tokens * out_columns);
    fill(&scale, tokens);
    fill(&gate, tokens * columns);
    fill(&position, 2 * longest - 1);
    fill(&time, thresholds.size() + 1);
    fill(&norm_weight, columns);
    fill(&norm_bias, columns);
    for (int64_t t = 0; t < tokens; ++t) {
      answers.push_back(static_cast<int64_t>(random()) * (form.far_times ? int64_t{1} << 29 : 1) % (int64_t{1} << 60));
      asks.push_back(answers.back() + random() % 12'000);
    }
    for (size_t b = lengths.size(); b-- > 0;) {  // arrays of queries: without the tokens that do not ask
      const int64_t hidden = lengths[b] - (query_splits[b + 1] - query_splits[b]);
      const auto drop = [&](auto* array, int64_t width) {
        array->erase(array->begin() + splits[b] * width, array->begin() + (splits[b] + hidden) * width);
      };
      drop(&query, kHeads * form.qk_dim);
      drop(&grads, out_columns);
      drop(&gate, columns);
      drop(&scale, 1);
      drop(&asks, 1);
    }
    call.batch = static_cast<int64_t>(lengths.size());
    call.tokens = tokens;
    call.queries = query_splits.back();
    call.heads = kHeads;
    call.qk_dim = form.qk_dim;
    call.value_dim = form.value_dim;
    call.channels = form.channels ? form.position + form.time : 0;
    call.target_group_size = masks.group;
    call.attention_window = masks.window;
    call.min_full_length = masks.full;
    call.global_window = masks.global;
    call.alpha = 0.6f;
    call.scale_stride = 1;
    call.epsilon = 1e-2f;
    call.per_head = form.per_head;
    call.gate_first = form.gate_first;
    if (form.position) call.bias.max_length = longest;
    if (form.time) call.bias.time = TimeMap::kBuckets;
    call.bias.num_thresholds = static_cast<int32_t>(thresholds.size());
  }

  // Runs both passes.
  void Run(const TileEngine& engine, const ParallelFor& parallel_for) {
    const auto unset = [](Floats* array, size_t size) {
      array->assign(size, 1e30f);
      return array->data();
    };
    AttentionCall<float> c = call;
    c.row_splits = splits.data();
    c.query_splits = query_splits.data();
    c.num_targets = targets.data();
    c.contextual_lengths = contexts.data();
    c.bias.position_weights = form.position ? position.data() : nullptr;
    c.bias.thresholds = thresholds.data();
    c.bias.time_weights = time.data();
    c.bias.asks = asks.data();
    c.bias.answers = answers.data();
    c.scale = scale.data();
    c.query = query.data();
    c.key = key.data();
    c.value = value.data();
    c.grads = grads.data();
    c.out = unset(&out, grads.size());
    if (form.gate) {
      c.gate = gate.data();
      c.gated = unset(&gated, out.size());
      c.gate_grads = unset(&gate_grads, out.size());
    }
    if (form.norm) {
      c.norm_weight = norm_weight.data();
      c.norm_bias = norm_bias.data();
      c.norm_weight_grads = unset(&weight_grads, norm_weight.size());
      c.norm_bias_grads = unset(&bias_grads, norm_bias.size());
    }
    if (!form.channels) {
      c.query_grads = unset(&query_grads, query.size());
      c.key_grads = unset(&key_grads, key.size());
    }
    c.value_grads = unset(&value_grads, value.size());
    if (form.position) c.position_grads = unset(&position_grads, position.size());
    if (form.time) c.time_grads = unset(&time_grads, time.size());
    AttentionForward(c, engine, parallel_for);
    AttentionBackward(c, engine, parallel_for);
  }

  static constexpr Floats Batch::* kResults[] = {
      &Batch::out,        &Batch::gated,          &Batch::query_grads, &Batch::key_grads,    &Batch::value_grads,
      &Batch::gate_grads, &Batch::position_grads, &Batch::time_grads,  &Batch::weight_grads, &Batch::bias_grads};
};

// Results as near as sums of some hundred float32 products in another order are, relative to the largest entry. Gradients
// of weights sum 10^5 and more, which may cancel: they are near relative to what was summed.
void CheckNear(const Batch& ours, const Batch& wanted, const std::string& what) {
  int number = 0;
  for (const auto result : Batch::kResults) {
    const Floats &got = ours.*result, &want = wanted.*result;
    const bool of_weights = &got == &ours.position_grads || &got == &ours.time_grads;
    double most = 0.0;
    for (const float x : want) most = std::max(most, static_cast<double>(std::abs(x)));
    const double limit = most * (of_weights ? 1e-3 : 2e-5) + 1e-9;
    CHECK_EQ(got.size(), want.size());
    for (size_t n = 0; n < want.size(); ++n) {
      CHECK(std::abs(got[n] - want[n]) <= limit, "result ", number, " [", n, "] of ", what, ": ", got[n], ", wanted ",
            want[n], ", limit ", limit);
    }
    ++number;
  }
}

void EveryEngine(const std::vector<int64_t>& lengths, const Masks& masks, const Form& form,
                 const std::vector<int64_t>& queries = {}) {
  Batch best(lengths, masks, form, queries), ours = best, threaded = best;
  best.Run(*Engines().front(), SerialFor);
  for (const TileEngine* engine : Engines()) {
    ours.Run(*engine, SerialFor);
    CheckNear(ours, best, engine->name);
    threaded.Run(*engine, Threads(3));
    for (const auto result : Batch::kResults) CHECK(threaded.*result == ours.*result, "", engine->name);
  }
}

// Rows of one panel without a bias have a way of their own. A bias of zeros sends the same rows the long way.
void ShortRows(const Masks& masks) {
  // Fewer than a vector of floats, and beside the edges of one to four vectors.
  const std::vector<int64_t> lengths = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64};
  Form short_form{16, 32, false, false}, long_form{16, 32, true, false};
  EveryEngine(lengths, masks, short_form);
  Batch ours(lengths, masks, short_form), wanted(lengths, masks, long_form);
  std::fill(wanted.position.begin(), wanted.position.end(), 0.0f);
  ours.Run(*Engines().front(), SerialFor);
  wanted.Run(*Engines().front(), SerialFor);
  ours.position_grads = wanted.position_grads;
  CheckNear(ours, wanted, "short rows");
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
  Form far, channels, gate;
  far.far_times = channels.channels = gate.gate = true;
  const std::vector<int64_t> awkward = {5, 0, 63, 1, 65, 130};
  EveryEngine({40, 17}, {0, 0, 0, 3}, far);
  EveryEngine({600}, {2, 0, 0, 70}, {});  // several units of keys
  EveryEngine({600}, {2, 0, 0, 70}, channels);
  EveryEngine({}, {}, {});
  EveryEngine({}, {}, channels);
  EveryEngine({130, 70, 0, 600, 65}, {2, 20, 5, 65, 3}, {}, {130, 70, 0, 71, 65});
  gate.position = gate.time = false;  // a unit for each head
  EveryEngine({600, 3}, {}, gate);
  if (kRacesAlone) return;
  BucketsOfCells();
  for (const Masks& masks : {Masks{}, Masks{0, 0, 0, 9}, Masks{3}, Masks{2, 20, 5, 70, 3}, Masks{0, 9, 0, 3, 1, 5},
                             Masks{3, 20, 2, 9, 2, 30}}) {
    EveryEngine(awkward, masks, {});
    EveryEngine(awkward, masks, channels);
    EveryEngine(awkward, masks, {}, {0, 0, 31, 1, 9, 100});
    ShortRows(masks);
  }
  for (const auto& [norm, per_head, gate_first] :
       {std::array{true, false, false}, {true, true, false}, {true, false, true}, {false, true, true}}) {
    gate.norm = norm, gate.per_head = per_head, gate.gate_first = gate_first;
    EveryEngine(awkward, {}, gate);
  }
  EveryEngine({40, 700}, {0, INT64_MAX, 0, 3}, {});  // a window without an end
  EveryEngine({40, 700}, {2, 5, INT64_MAX - 700, 3}, {});
  EveryEngine({40, 700}, {2, 5, 0, 3, 1, INT64_MAX}, {});  // all history
}
