// Gradients of one row are summed in float32, in the order received, each multiplied by the scale: numbers whose sum
// depends on the order show it, bit by bit. And sums that wait for an update (Accumulate) end as one update with them.
#include "hash_table/cpu/parts/gradient_sum.h"

#include <cmath>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "batches.h"
#include "check.h"
#include "hash_table/cpu/hash_table.h"
#include "threads.h"

namespace fusedrec {
namespace {

// Over twelve orders of magnitude: every order of summation has another result.
std::vector<float> Unequal(size_t n, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> numbers(n);
  for (float& number : numbers) {
    const int power = static_cast<int>((*random)() % 13) - 6;
    number = normal(*random) * std::pow(10.0f, static_cast<float>(power));
  }
  return numbers;
}

std::vector<float> SumsInOrder(const std::vector<int32_t>& inverse, int rows, const std::vector<float>& grads, int dim,
                               float scale) {
  std::vector<float> sums(rows * dim);
  std::vector<bool> begun(rows);
  for (size_t v = 0; v < inverse.size(); ++v) {
    for (int d = 0; d < dim; ++d) {
      const float part = grads[v * dim + d] * scale;
      float& sum = sums[inverse[v] * dim + d];
      sum = begun[inverse[v]] ? sum + part : part;
    }
    begun[inverse[v]] = true;
  }
  return sums;
}

void InTheOrderReceived(Storage storage, int dim) {
  constexpr int kRows = 37, kReceived = 600;
  std::mt19937 random(dim);
  std::vector<int32_t> inverse(kReceived);
  for (int32_t& number : inverse) number = static_cast<int32_t>(random() % (kRows - 1));  // the last one has none
  std::vector<float> grads = Unequal(kReceived * dim, &random);
  std::vector<char> sent(grads.size() * 4);
  Convert(grads.data(), Storage::kFloat32, grads.size(), storage, sent.data());
  Convert(sent.data(), storage, grads.size(), Storage::kFloat32, grads.data());
  const std::vector<float> wanted = SumsInOrder(inverse, kRows, grads, dim, 0.7f);
  const std::vector<int64_t> handles(kRows);
  const GradientSum sums({handles, inverse, sent.data(), storage, 0.7f}, dim);
  std::vector<float> sum(dim, 1e9f);  // what it held before is not added
  for (int number = 0; number < kRows; ++number) {
    sums.Prefetch(number);
    sums.Sum(number, sum.data());
    for (int d = 0; d < dim; ++d) CHECK_EQ(sum[d], wanted[number * dim + d], "row ", number, ", column ", d);
  }
}

struct RuleCase {
  std::string name;
  std::vector<float> hyperparameters;
};

// Three batches from two sources, then one update; beside it one batch of the sums.
void AccumulatedIsAppliedLikeItsSum(const RuleCase& rule) {
  constexpr int kDim = 6;
  TableSpec spec;
  spec.dim = kDim;
  spec.distribution = Distribution::kNormal;
  spec.b = 1.0;
  spec.seeds = {1, 2};
  std::mt19937 random(7);
  const std::unique_ptr<HashTable> accumulated = MakeTable(spec, rule.name, rule.hyperparameters);
  const std::unique_ptr<HashTable> applied = MakeTable(spec, rule.name, rule.hyperparameters);
  for (int64_t update = 1; update <= 4; ++update) {
    std::map<Received, std::vector<float>> sums;
    for (int batch = 0; batch < 3; ++batch) {
      Batch ids(2, std::vector<Ids>(2));
      for (std::vector<Ids>& source : ids) {
        for (Ids& of_segment : source) {
          for (int n = 0; n < 30; ++n) of_segment.push_back(random() % 40);
        }
      }
      const Packed packed(ids);
      const Answer answer = MustLookUp(accumulated.get(), packed);
      const std::vector<float> grads = Unequal(packed.received().size() * kDim, &random);
      CHECK_OK(Accumulate(accumulated.get(), answer, grads, 0.25f, Threads(3)));
      const std::vector<float> of_batch = SumsInOrder(answer.inverse, answer.handles.size(), grads, kDim, 0.25f);
      std::map<Received, int32_t> numbers;
      for (size_t v = 0; v < answer.inverse.size(); ++v) numbers[packed.received()[v]] = answer.inverse[v];
      for (const auto& [key, number] : numbers) {
        std::vector<float>& sum = sums[key];
        sum.resize(kDim, 0.0f);
        for (int d = 0; d < kDim; ++d) sum[d] += of_batch[number * kDim + d];
      }
    }
    CHECK_OK(accumulated->ApplyAccumulated({Threads(3)}, {0.05f, update}));

    Batch all(1, std::vector<Ids>(2));
    std::vector<float> grads;
    for (const auto& [key, sum] : sums) {
      all[0][key.segment].push_back(key.id);
      grads.insert(grads.end(), sum.begin(), sum.end());
    }
    const Answer answer = MustLookUp(applied.get(), Packed(all));
    CHECK_OK(Apply(applied.get(), answer, grads, {0.05f, update}));
    for (int64_t segment = 0; segment < 2; ++segment) {
      const auto got = RecordsById(*accumulated, segment), wanted = RecordsById(*applied, segment);
      CHECK_EQ(got.size(), wanted.size());
      for (const auto& [id, record] : wanted) {
        CHECK(got.at(id).numbers == record.numbers, "", rule.name, ", id ", id, ", update ", update);
      }
    }
  }
}

// A second update without gradients changes nothing: what waited is gone.
void SumsAreForgotten() {
  TableSpec spec;
  spec.dim = 1;
  spec.seeds = {1};
  const std::unique_ptr<HashTable> table = MakeTable(spec);
  const Packed packed(Batch{{Ids{5}}});
  const std::vector<float> one = {1.0f};
  const Answer answer = MustLookUp(table.get(), packed);
  CHECK_OK(Accumulate(table.get(), answer, one));
  CHECK_OK(table->ApplyAccumulated({SerialFor}, {0.5f, 1}));
  CHECK_OK(table->ApplyAccumulated({SerialFor}, {0.5f, 2}));
  CHECK_EQ(FindRows(*table, packed)[0], -0.5f);
  CHECK_OK(Accumulate(table.get(), answer, one));
  CHECK_OK(table->Clear({SerialFor}));
  CHECK_OK(table->ApplyAccumulated({SerialFor}, {0.5f, 3}));
  CHECK_EQ(FindRows(*table, packed)[0], 0.0f);
}

}  // namespace
}  // namespace fusedrec

TEST(gradient_sum) {
  using namespace fusedrec;
  for (const Storage storage : {Storage::kFloat32, Storage::kBfloat16, Storage::kFloat16}) {
    for (const int dim : {1, 8, 300}) InTheOrderReceived(storage, dim);
  }
  for (const RuleCase& rule : {RuleCase{"sgd", {0.0f}}, RuleCase{"adagrad", {0.0f, 0.1f, 1e-7f, 0.0f, 0.0f}},
                           RuleCase{"rowwise_adagrad", {0.0f, 0.0f, 1e-8f, 0.0f, 0.0f, 1.0f}}}) {
    AccumulatedIsAppliedLikeItsSum(rule);
  }
  SumsAreForgotten();
}
