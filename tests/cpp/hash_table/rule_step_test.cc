// Update rules bit by bit: vectors and their remainders do what one column alone does, sums over a row are those of 16
// parts, nothing beyond the row is touched, and rules that do not exist are refused. That the formulas are right is
// checked in Python, against Keras and a NumPy oracle.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "batches.h"
#include "check.h"
#include "hash_table/cpu/rule_step.h"

namespace fusedrec {
namespace {

constexpr float kGuard = 12345.0f;

struct Case {
  const char* rule;
  std::vector<float> hyperparameters;  // clipnorm first
  bool by_column;                      // a column does not depend on the others
};

std::vector<Case> Cases() {
  return {
      {"sgd", {0}, true},
      {"momentum", {0, 0.9f, 0}, true},
      {"momentum", {0, 0.9f, 1}, true},
      {"adagrad", {0, 0.1f, 1e-3f, 0, 0}, true},
      {"adagrad", {0, 0.1f, 1e-3f, 1, 0.3f}, true},
      {"rmsprop", {0, 0.1f, 1e-3f, 0}, true},
      {"rmsprop", {0, 0.1f, 1e-3f, 1}, true},
      {"adam", {0, 0.1f, 0.001f, 1e-3f, 0}, true},
      {"adam", {0, 0.1f, 0.001f, 1e-3f, 0.1f}, true},
      {"ftrl", {0, 0.1f, -0.5f, 0.1f, 0.2f, 0.3f, 0.4f}, true},
      {"ftrl", {0, 0.0f, -0.7f, 0, 0, 0, 0}, true},
      {"sgd", {0.5f}, false},
      {"rowwise_adagrad", {0, 0.1f, 1e-3f, 0, 0, 2}, false},
      {"rowwise_adagrad", {0, 0, 1e-3f, 1, 0, 1}, false},
      {"rowwise_adagrad", {0.5f, 0, 1e-3f, 0, 1, 1}, false},
  };
}

// One row with all that belongs to it, between guards.
struct Row {
  Row(const AnyRule& rule, int dim) : dim(dim), grad(dim + 1, kGuard), w(dim + 1, kGuard) {
    const auto [slots, row_slots] = SlotsOf(rule);
    for (int k = 0; k < slots; ++k) wide.insert(wide.end(), dim, SlotStart(rule, k));
    for (int k = 0; k < row_slots; ++k) scalars.push_back(SlotStart(rule, slots + k));
    wide.push_back(kGuard);
    scalars.push_back(kGuard);
  }

  void Update(const RuleStep& step) {
    step.Train(dim, grad.data(), w.data(), wide.data(), scalars.data());
    for (const auto* part : {&grad, &w, &wide, &scalars}) CHECK_EQ(part->back(), kGuard, "dim ", dim);
  }

  int dim;
  std::vector<float> grad, w, wide, scalars;
};

bool SameBits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

AnyRule MakeOrFail(const Case& tried) {
  AnyRule rule;
  CHECK_EQ(MakeRule(tried.rule, tried.hyperparameters, &rule), "", "rule ", tried.rule);
  return rule;
}

float InSixteenParts(const std::vector<float>& x, int n) {
  float part[16] = {};
  for (int d = 0; d < n; ++d) part[d % 16] += x[d] * x[d];
  for (int half = 8; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) part[j] += part[j + half];
  }
  return part[0];
}

// Every column of a row of `dim` equals a row of that column alone.
void ColumnsAreAlone(const Case& tried, int dim, std::mt19937* random) {
  const AnyRule rule = MakeOrFail(tried);
  std::normal_distribution<float> normal;
  Row row(rule, dim);
  std::vector<Row> columns(dim, Row(rule, 1));
  for (int d = 0; d < dim; ++d) columns[d].w[0] = row.w[d] = normal(*random);
  for (int step = 1; step <= 4; ++step) {
    const RuleStep by(rule, {0.1f, step});
    for (int d = 0; d < dim; ++d) columns[d].grad[0] = row.grad[d] = d % 5 == 4 ? 0.0f : normal(*random);
    row.Update(by);
    for (int d = 0; d < dim; ++d) {
      columns[d].Update(by);
      CHECK(SameBits(row.w[d], columns[d].w[0]), "rule ", tried.rule, ", column ", d, " of ", dim, ", step ", step);
      CHECK(std::isfinite(row.w[d]), "rule ", tried.rule, ", column ", d);
      for (int k = 0; k < SlotsOf(rule).wide; ++k) {
        const float got = row.wide[k * dim + d], wanted = columns[d].wide[k];
        CHECK(SameBits(got, wanted), "rule ", tried.rule, ", slot ", k, ", column ", d, " of ", dim);
      }
    }
  }
}

// Rules that see the whole row: the same steps in scalar code, in the order that rule_step.cc promises.
void RowsAreSummedInParts(const Case& tried, int dim, std::mt19937* random) {
  const AnyRule rule = MakeOrFail(tried);
  const std::vector<float>& h = tried.hyperparameters;
  std::normal_distribution<float> normal;
  Row row(rule, dim);
  for (int d = 0; d < dim; ++d) row.w[d] = normal(*random);
  std::vector<float> w = row.w;
  float v = SlotsOf(rule).scalar > 0 ? h[1] : 0;
  for (int step = 1; step <= 4; ++step) {
    for (int d = 0; d < dim; ++d) row.grad[d] = normal(*random);
    std::vector<float> grad = row.grad;
    row.Update(RuleStep(rule, {0.1f, step}));

    const float norm = std::sqrt(InSixteenParts(grad, dim));
    const float scale = h[0] > 0 && norm > h[0] ? h[0] / norm : 1.0f;
    for (int d = 0; d < dim; ++d) grad[d] *= scale;
    float rate = 0.1f;
    if (SlotsOf(rule).scalar > 0) {
      const float squares = InSixteenParts(grad, dim);
      v += h[4] != 0 ? squares / static_cast<float>(dim) : squares;
      const float scaled = v / h[5] + (h[1] - h[1] / h[5]);
      rate /= h[3] != 0 ? std::sqrt(scaled + h[2]) : std::sqrt(scaled) + h[2];
      CHECK(SameBits(row.scalars[0], v), "rule ", tried.rule, ", dim ", dim, ", step ", step);
    }
    for (int d = 0; d < dim; ++d) {
      w[d] -= rate * grad[d];
      CHECK(SameBits(row.w[d], w[d]), "rule ", tried.rule, ", column ", d, " of ", dim, ", step ", step);
    }
  }
}

void Refused(const std::string& rule, const std::vector<float>& hyperparameters, const std::string& words) {
  AnyRule made;
  const std::string said = MakeRule(rule, hyperparameters, &made);
  CHECK(said.find(words) != std::string::npos, "said: ", said);
}

}  // namespace
}  // namespace fusedrec

TEST(rule_step) {
  std::mt19937 random(1);
  for (const auto& tried : fusedrec::Cases()) {
    for (int dim = 1; dim <= 70; ++dim) {
      (tried.by_column ? fusedrec::ColumnsAreAlone : fusedrec::RowsAreSummedInParts)(tried, dim, &random);
    }
  }
  fusedrec::Refused("lion", {0}, "adam, ftrl, got 'lion'");
  fusedrec::Refused("adam", {0}, "rule adam: one_minus_beta_1 must be finite and lie in [");
  fusedrec::Refused("sgd", {0, 0.9f}, "rule sgd: it has no parameter number 1");
  fusedrec::Refused("sgd", {std::numeric_limits<float>::infinity()}, "clipnorm must be finite and lie in [0, ");
}
