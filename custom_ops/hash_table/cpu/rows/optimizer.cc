#include "hash_table/cpu/rows/optimizer.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "common/simd.h"

namespace fusedrec {
namespace {

// Sum of squares, as 16 sums of every 16th column, added in pairs. One vector of AVX-512 or four of the baseline do the
// same additions in the same order. Inlined into each clone of its callers.
inline __attribute__((always_inline)) float SumOfSquares(const float* __restrict__ x, int n) {
  constexpr int kParts = 16;
  float part[kParts] = {};
  int d = 0;
  for (; d + kParts <= n; d += kParts) {
    for (int j = 0; j < kParts; ++j) part[j] += x[d + j] * x[d + j];
  }
  for (int j = 0; j < n - d; ++j) part[j] += x[d + j] * x[d + j];
  for (int half = kParts / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) part[j] += part[j + half];
  }
  return part[0];
}

// The norm where float squares overflow or vanish.
float NormInDouble(const float* x, int n) {
  double sum = 0;
  for (int d = 0; d < n; ++d) sum += static_cast<double>(x[d]) * x[d];
  return static_cast<float>(std::sqrt(sum));
}

FUSEDREC_CLONES void Clip(float clipnorm, int n, float* __restrict__ g) {
  const float squares = SumOfSquares(g, n);
  const float norm = squares > kSmallestSquares && squares < kLargestSquares ? std::sqrt(squares) : NormInDouble(g, n);
  if (!(norm > clipnorm)) return;
  const float scale = clipnorm / norm;
  for (int d = 0; d < n; ++d) g[d] *= scale;
}

FUSEDREC_CLONES void Sgd(float lr, int n, const float* __restrict__ g, float* __restrict__ w) {
  for (int d = 0; d < n; ++d) SgdColumn(lr, g[d], w + d);
}

FUSEDREC_CLONES void Momentum(float lr, float mu, bool nesterov, int n, const float* __restrict__ g,
                              float* __restrict__ w, float* __restrict__ m) {
  if (nesterov) {
    for (int d = 0; d < n; ++d) MomentumColumn(lr, mu, true, g[d], w + d, m + d);
  } else {
    for (int d = 0; d < n; ++d) MomentumColumn(lr, mu, false, g[d], w + d, m + d);
  }
}

FUSEDREC_CLONES void Adagrad(float lr, float epsilon, bool inside, float offset, int n, const float* __restrict__ g,
                             float* __restrict__ w, float* __restrict__ v) {
  if (inside) {
    for (int d = 0; d < n; ++d) AdagradColumn(lr, epsilon, true, offset, g[d], w + d, v + d);
  } else {
    for (int d = 0; d < n; ++d) AdagradColumn(lr, epsilon, false, offset, g[d], w + d, v + d);
  }
}

FUSEDREC_CLONES void Rmsprop(float lr, float one_minus_rho, float epsilon, bool inside, int n,
                             const float* __restrict__ g, float* __restrict__ w, float* __restrict__ v) {
  if (inside) {
    for (int d = 0; d < n; ++d) RmspropColumn(lr, one_minus_rho, epsilon, true, g[d], w + d, v + d);
  } else {
    for (int d = 0; d < n; ++d) RmspropColumn(lr, one_minus_rho, epsilon, false, g[d], w + d, v + d);
  }
}

// v += |g|^2, or |g|^2 / D;  w -= rate g
FUSEDREC_CLONES void RowwiseAdagrad(const UpdateRule& rule, float lr, int n, const float* __restrict__ g,
                                    float* __restrict__ w, float* __restrict__ v) {
  const float squares = SumOfSquares(g, n);
  *v += rule.mean ? squares / static_cast<float>(n) : squares;
  const float rate = RowwiseRate(rule, lr, *v);
  for (int d = 0; d < n; ++d) SgdColumn(rate, g[d], w + d);
}

FUSEDREC_CLONES void Adam(float rate, float decay, float one_minus_beta_1, float one_minus_beta_2, float epsilon, int n,
                          const float* __restrict__ g, float* __restrict__ w, float* __restrict__ m,
                          float* __restrict__ v) {
  for (int d = 0; d < n; ++d) {
    AdamColumn(rate, decay, one_minus_beta_1, one_minus_beta_2, epsilon, g[d], w + d, m + d, v + d);
  }
}

FUSEDREC_CLONES void FtrlSquareRoot(FtrlNumbers by, int dim, const float* __restrict__ g, float* __restrict__ w,
                                    float* __restrict__ n, float* __restrict__ z) {
  for (int d = 0; d < dim; ++d) FtrlSquareRootColumn(by, g[d], w + d, n + d, z + d);
}

void FtrlPower(FtrlNumbers by, float power, int dim, const float* g, float* w, float* n, float* z) {
  for (int d = 0; d < dim; ++d) FtrlPowerColumn(by, power, g[d], w + d, n + d, z + d);
}

}  // namespace

absl::StatusOr<Optimizer> Optimizer::Make(const std::string& rule, absl::Span<const float> hyperparameters) {
  struct Known {
    const char* name;
    RuleKind rule;
    size_t hyperparameters;
  };
  static constexpr Known kKnown[] = {
      {"sgd", RuleKind::kSgd, 1},         {"momentum", RuleKind::kMomentum, 3},
      {"adagrad", RuleKind::kAdagrad, 5}, {"rowwise_adagrad", RuleKind::kRowwiseAdagrad, 6},
      {"rmsprop", RuleKind::kRmsprop, 4}, {"adam", RuleKind::kAdam, 4},
      {"adamw", RuleKind::kAdamW, 5},     {"ftrl", RuleKind::kFtrl, 7},
  };
  const auto known = std::find_if(std::begin(kKnown), std::end(kKnown), [&](const Known& k) { return rule == k.name; });
  if (known == std::end(kKnown)) {
    return absl::InvalidArgumentError(
        absl::StrCat("rule must be sgd, momentum, adagrad, rowwise_adagrad, rmsprop, adam, adamw or ftrl, got '", rule,
                     "'. Take it from a record of tf_fusedrec.optimizers."));
  }
  if (hyperparameters.size() != known->hyperparameters) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hyperparameters of rule ", rule, " must be ", known->hyperparameters, ", got ", hyperparameters.size(),
        ". Take them from a record of tf_fusedrec.optimizers."));
  }
  for (size_t i = 0; i < hyperparameters.size(); ++i) {
    if (!std::isfinite(hyperparameters[i])) {
      return absl::InvalidArgumentError(absl::StrCat("hyperparameters of rule ", rule, " must be finite, got ",
                                                     hyperparameters[i], " at place ", i,
                                                     ". To switch clipping off, say clipnorm = 0."));
    }
  }
  Optimizer made;
  UpdateRule& made_rule = made.rule_;
  made_rule.rule = known->rule;
  const float* next = hyperparameters.data();
  made_rule.clipnorm = *next++;
  switch (made_rule.rule) {
    case RuleKind::kSgd:
      break;
    case RuleKind::kMomentum:
      made_rule.momentum = *next++;
      made_rule.nesterov = *next++ != 0;
      break;
    case RuleKind::kRowwiseAdagrad:
    case RuleKind::kAdagrad:
      made_rule.initial_accumulator_value = *next++;
      made_rule.epsilon = *next++;
      made_rule.epsilon_inside = *next++ != 0;
      if (made_rule.rule == RuleKind::kAdagrad) {
        made_rule.moment_offset = *next++;
        break;
      }
      made_rule.mean = *next++ != 0;
      made_rule.moment_scale = *next++;
      break;
    case RuleKind::kRmsprop:
      made_rule.one_minus_beta_2 = *next++;  // rho decays the squares, as beta_2 does
      made_rule.epsilon = *next++;
      made_rule.epsilon_inside = *next++ != 0;
      break;
    case RuleKind::kAdam:
    case RuleKind::kAdamW:
      made_rule.one_minus_beta_1 = *next++;
      made_rule.one_minus_beta_2 = *next++;
      made_rule.epsilon = *next++;
      if (made_rule.rule == RuleKind::kAdamW) made_rule.weight_decay = *next++;
      break;
    case RuleKind::kFtrl:
      made_rule.initial_accumulator_value = *next++;
      made_rule.learning_rate_power = *next++;
      made_rule.l1 = *next++;
      made_rule.l2 = *next++;
      made_rule.l2_shrinkage = *next++;
      made_rule.beta = *next++;
      break;
  }
  return made;
}

void Optimizer::Update(const Prepared& prepared, int dim, float* grad, float* row, float* wide, float* scalars) const {
  const float lr = prepared.learning_rate;
  if (rule_.clipnorm > 0) Clip(rule_.clipnorm, dim, grad);
  switch (rule_.rule) {
    case RuleKind::kSgd:
      Sgd(lr, dim, grad, row);
      break;
    case RuleKind::kMomentum:
      Momentum(lr, rule_.momentum, rule_.nesterov, dim, grad, row, wide);
      break;
    case RuleKind::kAdagrad:
      Adagrad(lr, rule_.epsilon, rule_.epsilon_inside, rule_.moment_offset, dim, grad, row, wide);
      break;
    case RuleKind::kRmsprop:
      Rmsprop(lr, rule_.one_minus_beta_2, rule_.epsilon, rule_.epsilon_inside, dim, grad, row, wide);
      break;
    case RuleKind::kRowwiseAdagrad:
      RowwiseAdagrad(rule_, lr, dim, grad, row, scalars);
      break;
    case RuleKind::kAdam:
    case RuleKind::kAdamW:
      Adam(prepared.a, prepared.b, rule_.one_minus_beta_1, rule_.one_minus_beta_2, rule_.epsilon, dim, grad, row, wide, wide + dim);
      break;
    case RuleKind::kFtrl: {
      if (lr == 0) break;  // the formula divides by it; a rate of 0, as schedules begin with, leaves the row alone
      const FtrlNumbers by{prepared.a, rule_.l1, prepared.b, rule_.l2_shrinkage};
      if (rule_.learning_rate_power == -0.5f) {
        FtrlSquareRoot(by, dim, grad, row, wide, wide + dim);
      } else {
        FtrlPower(by, -rule_.learning_rate_power, dim, grad, row, wide, wide + dim);
      }
      break;
    }
  }
}

}  // namespace fusedrec
