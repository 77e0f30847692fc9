#include "hash_table/optimizer.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/simd.h"

namespace fusedrec {
namespace {

// Sum of squares, as 16 sums of every 16th column, added in pairs: one vector of AVX-512 or four of the baseline do the
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
  constexpr float kSmallest = 1e-30f, kLargest = 1e30f;  // sums of squares that float holds to full precision
  const float squares = SumOfSquares(g, n);
  const float norm = squares > kSmallest && squares < kLargest ? std::sqrt(squares) : NormInDouble(g, n);
  if (!(norm > clipnorm)) return;
  const float scale = clipnorm / norm;
  for (int d = 0; d < n; ++d) g[d] *= scale;
}

// w -= lr g
FUSEDREC_CLONES void Sgd(float lr, int n, const float* __restrict__ g, float* __restrict__ w) {
  for (int d = 0; d < n; ++d) w[d] -= lr * g[d];
}

// m = mu m - lr g;  w += m, or with Nesterov's look-ahead w += mu m - lr g. (Keras; Sutskever et al., ICML 2013)
FUSEDREC_CLONES void Momentum(float lr, float mu, bool nesterov, int n, const float* __restrict__ g,
                              float* __restrict__ w, float* __restrict__ m) {
  if (nesterov) {
    for (int d = 0; d < n; ++d) {
      m[d] = mu * m[d] - lr * g[d];
      w[d] += mu * m[d] - lr * g[d];
    }
  } else {
    for (int d = 0; d < n; ++d) {
      m[d] = mu * m[d] - lr * g[d];
      w[d] += m[d];
    }
  }
}

// v += g^2;  w -= lr g / (sqrt(v) + epsilon), or lr g / sqrt(v + epsilon). (Duchi et al., JMLR 2011, diagonal form)
FUSEDREC_CLONES void Adagrad(float lr, float epsilon, bool inside, int n, const float* __restrict__ g,
                             float* __restrict__ w, float* __restrict__ v) {
  if (inside) {
    for (int d = 0; d < n; ++d) {
      v[d] += g[d] * g[d];
      w[d] -= lr * g[d] / std::sqrt(v[d] + epsilon);
    }
  } else {
    for (int d = 0; d < n; ++d) {
      v[d] += g[d] * g[d];
      w[d] -= lr * g[d] / (std::sqrt(v[d]) + epsilon);
    }
  }
}

// v += |g|^2, or |g|^2 / D;  w -= lr g / (sqrt(v / c) + epsilon), or lr g / sqrt(v / c + epsilon).
// (2D sparse parallelism, Algorithm 1, lines 5 and 6)
FUSEDREC_CLONES void RowwiseAdagrad(float lr, float epsilon, bool inside, bool mean, float c, int n,
                                    const float* __restrict__ g, float* __restrict__ w, float* __restrict__ v) {
  const float squares = SumOfSquares(g, n);
  *v += mean ? squares / static_cast<float>(n) : squares;
  const float rate = lr / (inside ? std::sqrt(*v / c + epsilon) : std::sqrt(*v / c) + epsilon);
  for (int d = 0; d < n; ++d) w[d] -= rate * g[d];
}

// w -= decay w;  m += (1 - beta_1)(g - m);  v += (1 - beta_2)(g^2 - v);  w -= rate m / (sqrt(v) + epsilon)
// (Kingma and Ba, ICLR 2015, in the order just before section 2.1; Loshchilov and Hutter, ICLR 2019, Algorithm 2)
FUSEDREC_CLONES void Adam(float rate, float decay, float one_minus_beta_1, float one_minus_beta_2, float epsilon, int n,
                          const float* __restrict__ g, float* __restrict__ w, float* __restrict__ m,
                          float* __restrict__ v) {
  for (int d = 0; d < n; ++d) {
    m[d] += (g[d] - m[d]) * one_minus_beta_1;
    v[d] += (g[d] * g[d] - v[d]) * one_minus_beta_2;
    w[d] = (w[d] - w[d] * decay) - m[d] * rate / (std::sqrt(v[d]) + epsilon);
  }
}

// What all loops of FTRL do to one column, given power(n) = n^-learning_rate_power:
//   n' = n + g^2;  z += g + 2 shrinkage w - (power(n') - power(n)) / lr w
//   w = (z clipped to [-l1, l1] - z) / (power(n') / lr + 2 l2 + beta / lr)
// (McMahan et al., KDD 2013, Algorithm 1; shrinkage as in Keras)
struct FtrlNumbers {
  float inverse_rate, l1, l2_term, shrinkage;
};

inline __attribute__((always_inline)) void FtrlColumn(const FtrlNumbers& by, float old_power, float new_power, float g,
                                                      float* __restrict__ w, float* __restrict__ z) {
  *z += g + 2 * by.shrinkage * *w - (new_power - old_power) * by.inverse_rate * *w;
  // Without branches, so that the loop vectorizes. A column that never had a gradient is 0 / kSmallest, not 0 / 0.
  constexpr float kSmallest = std::numeric_limits<float>::min();
  const float quadratic = std::max(new_power * by.inverse_rate + by.l2_term, kSmallest);
  *w = (std::min(std::max(*z, -by.l1), by.l1) - *z) / quadratic;
}

FUSEDREC_CLONES void FtrlSquareRoot(FtrlNumbers by, int dim, const float* __restrict__ g, float* __restrict__ w,
                                    float* __restrict__ n, float* __restrict__ z) {
  for (int d = 0; d < dim; ++d) {
    const float sum = n[d] + g[d] * g[d];
    FtrlColumn(by, std::sqrt(n[d]), std::sqrt(sum), g[d], w + d, z + d);
    n[d] = sum;
  }
}

void FtrlPower(FtrlNumbers by, float power, int dim, const float* g, float* w, float* n, float* z) {
  for (int d = 0; d < dim; ++d) {
    const float sum = n[d] + g[d] * g[d];
    FtrlColumn(by, std::pow(n[d], power), std::pow(sum, power), g[d], w + d, z + d);
    n[d] = sum;
  }
}

// 1 - (1 - x)^t without the cancellation of small x: Adam's first steps divide by it.
double OneMinusPower(float x, int64_t t) { return -std::expm1(static_cast<double>(t) * std::log1p(-double{x})); }

}  // namespace

absl::StatusOr<Optimizer> Optimizer::Make(const std::string& rule, absl::Span<const float> hyperparameters) {
  struct Known {
    const char* name;
    Rule rule;
    size_t hyperparameters;
    int wide_slots, scalar_slots;
    bool starts_with_value;
  };
  static constexpr Known kKnown[] = {
      {"sgd", Rule::kSgd, 1, 0, 0, false},
      {"momentum", Rule::kMomentum, 3, 1, 0, false},
      {"adagrad", Rule::kAdagrad, 4, 1, 0, true},
      {"rowwise_adagrad", Rule::kRowwiseAdagrad, 6, 0, 1, true},
      {"adam", Rule::kAdam, 4, 2, 0, false},
      {"adamw", Rule::kAdamW, 5, 2, 0, false},
      {"ftrl", Rule::kFtrl, 7, 2, 0, true},
  };
  const auto known = std::find_if(std::begin(kKnown), std::end(kKnown), [&](const Known& k) { return rule == k.name; });
  if (known == std::end(kKnown)) {
    return absl::InvalidArgumentError(
        absl::StrCat("rule must be sgd, momentum, adagrad, rowwise_adagrad, adam, adamw or ftrl, got '", rule,
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
  made.rule_ = known->rule;
  made.wide_slots_ = known->wide_slots;
  made.scalar_slots_ = known->scalar_slots;
  made.starts_with_value_ = known->starts_with_value;
  const float* next = hyperparameters.data();
  made.clipnorm_ = *next++;
  switch (made.rule_) {
    case Rule::kSgd:
      break;
    case Rule::kMomentum:
      made.momentum_ = *next++;
      made.nesterov_ = *next++ != 0;
      break;
    case Rule::kRowwiseAdagrad:
    case Rule::kAdagrad:
      made.initial_accumulator_value_ = *next++;
      made.epsilon_ = *next++;
      made.epsilon_inside_ = *next++ != 0;
      if (made.rule_ == Rule::kAdagrad) break;
      made.mean_ = *next++ != 0;
      made.moment_scale_ = *next++;
      break;
    case Rule::kAdam:
    case Rule::kAdamW:
      made.one_minus_beta_1_ = *next++;
      made.one_minus_beta_2_ = *next++;
      made.epsilon_ = *next++;
      if (made.rule_ == Rule::kAdamW) made.weight_decay_ = *next++;
      break;
    case Rule::kFtrl:
      made.initial_accumulator_value_ = *next++;
      made.learning_rate_power_ = *next++;
      made.l1_ = *next++;
      made.l2_ = *next++;
      made.l2_shrinkage_ = *next++;
      made.beta_ = *next++;
      break;
  }
  return made;
}

Prepared Optimizer::Prepare(const StepInput& step) const {
  const float lr = step.learning_rate;
  switch (rule_) {
    case Rule::kAdam:
    case Rule::kAdamW: {
      const double first = OneMinusPower(one_minus_beta_1_, step.step);
      const double second = OneMinusPower(one_minus_beta_2_, step.step);
      return {lr, static_cast<float>(lr * std::sqrt(second) / first), lr * weight_decay_};
    }
    case Rule::kFtrl:
      return {lr, 1 / lr, 2 * l2_ + beta_ / lr};
    default:
      return {lr, 0, 0};
  }
}

void Optimizer::Update(const Prepared& prepared, int dim, float* grad, float* row, float* wide, float* scalars) const {
  const float lr = prepared.learning_rate;
  if (clipnorm_ > 0) Clip(clipnorm_, dim, grad);
  switch (rule_) {
    case Rule::kSgd:
      Sgd(lr, dim, grad, row);
      break;
    case Rule::kMomentum:
      Momentum(lr, momentum_, nesterov_, dim, grad, row, wide);
      break;
    case Rule::kAdagrad:
      Adagrad(lr, epsilon_, epsilon_inside_, dim, grad, row, wide);
      break;
    case Rule::kRowwiseAdagrad:
      RowwiseAdagrad(lr, epsilon_, epsilon_inside_, mean_, moment_scale_, dim, grad, row, scalars);
      break;
    case Rule::kAdam:
    case Rule::kAdamW:
      Adam(prepared.a, prepared.b, one_minus_beta_1_, one_minus_beta_2_, epsilon_, dim, grad, row, wide, wide + dim);
      break;
    case Rule::kFtrl: {
      if (lr == 0) break;  // the formula divides by it; a rate of 0, as schedules begin with, leaves the row alone
      const FtrlNumbers by{prepared.a, l1_, prepared.b, l2_shrinkage_};
      if (learning_rate_power_ == -0.5f) {
        FtrlSquareRoot(by, dim, grad, row, wide, wide + dim);
      } else {
        FtrlPower(by, -learning_rate_power_, dim, grad, row, wide, wide + dim);
      }
      break;
    }
  }
}

}  // namespace fusedrec
