// Update rules, one column at a time, on the CPU and on a GPU: the same operations in the same order, so that a row
// comes out with the same bits (but for FTRL with a learning_rate_power other than -0.5, which asks for a power).
//
// optimizer.h lists the rules and their numbers.
#pragma once

#include <cstdint>
#if !defined(__CUDACC_RTC__)
#include <cmath>
#endif

#include "common/host_device.h"

namespace fusedrec {

enum class RuleKind { kSgd, kMomentum, kAdagrad, kRowwiseAdagrad, kRmsprop, kAdam, kAdamW, kFtrl };

// A rule with its hyperparameters. It does not read the hyperparameters of other rules.
struct UpdateRule {
  RuleKind rule = RuleKind::kSgd;
  float clipnorm = 0;
  float momentum = 0;
  bool nesterov = false;
  float initial_accumulator_value = 0;
  float epsilon = 0;
  bool epsilon_inside = false;
  bool mean = false;
  float moment_scale = 1;
  float moment_offset = 0;
  float one_minus_beta_1 = 0;
  float one_minus_beta_2 = 0;
  float weight_decay = 0;
  float learning_rate_power = 0;
  float l1 = 0;
  float l2 = 0;
  float l2_shrinkage = 0;
  float beta = 0;
};

// Optimizer state of a row: element-wise slots of D numbers each, and row-wise slots of one number. The first slot starts
// with initial_accumulator_value, which is 0 for rules without one; the others start with 0.
struct SlotCounts {
  int wide, scalar;
};

FUSEDREC_HOST_DEVICE inline SlotCounts SlotsOf(RuleKind rule) {
  switch (rule) {
    case RuleKind::kSgd:
      return {0, 0};
    case RuleKind::kMomentum:
    case RuleKind::kAdagrad:
    case RuleKind::kRmsprop:
      return {1, 0};
    case RuleKind::kRowwiseAdagrad:
      return {0, 1};
    case RuleKind::kAdam:
    case RuleKind::kAdamW:
    case RuleKind::kFtrl:
      break;
  }
  return {2, 0};
}

// Numbers that all rows of one step share.
struct Prepared {
  float learning_rate;
  float a, b;  // adam: corrected rate, -; adamw: corrected rate, lr * weight_decay; ftrl: 1 / lr, 2 (l2 + beta / 2 lr)
};

constexpr float kSmallestSquares = 1e-30f, kLargestSquares = 1e30f;  // sums that float holds to full precision

#define FUSEDREC_COLUMN FUSEDREC_HOST_DEVICE inline __attribute__((always_inline))

// w -= lr g
FUSEDREC_COLUMN void SgdColumn(float lr, float g, float* w) { *w -= lr * g; }

// m = mu m - lr g;  w += m, or with Nesterov's look-ahead w += mu m - lr g. (Keras; Sutskever et al., ICML 2013)
FUSEDREC_COLUMN void MomentumColumn(float lr, float mu, bool nesterov, float g, float* w, float* m) {
  *m = mu * *m - lr * g;
  *w += nesterov ? mu * *m - lr * g : *m;
}

// w -= lr g / (sqrt(v) + epsilon), or lr g / sqrt(v + epsilon)
FUSEDREC_COLUMN void ScaledColumn(float lr, float epsilon, bool inside, float v, float g, float* w) {
  *w -= lr * g / (inside ? ::sqrtf(v + epsilon) : ::sqrtf(v) + epsilon);
}

// v += g^2; a step by v + offset. (Duchi et al., JMLR 2011, diagonal form)
// For a moment scale c the offset is (c - 1) v0: c (v0 + (v - v0) / c) = v + (c - 1) v0. The caller scales lr by sqrt(c)
// and epsilon by sqrt(c), or by c inside the root.
FUSEDREC_COLUMN void AdagradColumn(float lr, float epsilon, bool inside, float offset, float g, float* w, float* v) {
  *v += g * g;
  ScaledColumn(lr, epsilon, inside, *v + offset, g, w);
}

// v += (1 - rho)(g^2 - v); a step by v. (Tieleman and Hinton, 2012)
FUSEDREC_COLUMN void RmspropColumn(float lr, float one_minus_rho, float epsilon, bool inside, float g, float* w,
                                   float* v) {
  *v += (g * g - *v) * one_minus_rho;
  ScaledColumn(lr, epsilon, inside, *v, g, w);
}

// The rate of a row from its accumulator: lr / (sqrt(u) + epsilon), or lr / sqrt(u + epsilon), for u = v0 + (v - v0) / c.
// The scale c divides what gradients have added, not the initial v0. The form keeps the bits of v where c = 1.
// (2D sparse parallelism, Algorithm 1, lines 5 and 6)
FUSEDREC_COLUMN float RowwiseRate(const UpdateRule& rule, float lr, float v) {
  const float c = rule.moment_scale, start = rule.initial_accumulator_value;
  const float scaled = v / c + (start - start / c);
  return lr / (rule.epsilon_inside ? ::sqrtf(scaled + rule.epsilon) : ::sqrtf(scaled) + rule.epsilon);
}

// w -= decay w;  m += (1 - beta_1)(g - m);  v += (1 - beta_2)(g^2 - v);  w -= rate m / (sqrt(v) + epsilon)
// (Kingma and Ba, ICLR 2015, in the order just before section 2.1; Loshchilov and Hutter, ICLR 2019, Algorithm 2)
FUSEDREC_COLUMN void AdamColumn(float rate, float decay, float one_minus_beta_1, float one_minus_beta_2, float epsilon,
                                float g, float* w, float* m, float* v) {
  *m += (g - *m) * one_minus_beta_1;
  *v += (g * g - *v) * one_minus_beta_2;
  *w = (*w - *w * decay) - *m * rate / (::sqrtf(*v) + epsilon);
}

// The step of FTRL on one column, given power(n) = n^-learning_rate_power:
//   n' = n + g^2;  z += g + 2 shrinkage w - (power(n') - power(n)) / lr w
//   w = (z clipped to [-l1, l1] - z) / (power(n') / lr + 2 l2 + beta / lr)
// (McMahan et al., KDD 2013, Algorithm 1; shrinkage as in Keras)
struct FtrlNumbers {
  float inverse_rate, l1, l2_term, shrinkage;
};

FUSEDREC_COLUMN void FtrlColumn(const FtrlNumbers& by, float old_power, float new_power, float g, float* w, float* z) {
  *z += g + 2 * by.shrinkage * *w - (new_power - old_power) * by.inverse_rate * *w;
  // Without branches, so that the loop vectorizes. A column that never had a gradient is 0 / kSmallest, not 0 / 0.
  constexpr float kSmallest = 1.17549435e-38f;  // the smallest normal number
  const float sum = new_power * by.inverse_rate + by.l2_term;
  const float quadratic = sum < kSmallest ? kSmallest : sum;
  const float low = *z < -by.l1 ? -by.l1 : *z;
  *w = ((by.l1 < low ? by.l1 : low) - *z) / quadratic;
}

FUSEDREC_COLUMN void FtrlSquareRootColumn(const FtrlNumbers& by, float g, float* w, float* n, float* z) {
  const float sum = *n + g * g;
  FtrlColumn(by, ::sqrtf(*n), ::sqrtf(sum), g, w, z);
  *n = sum;
}

FUSEDREC_HOST_DEVICE inline void FtrlPowerColumn(const FtrlNumbers& by, float power, float g, float* w, float* n,
                                                 float* z) {
  const float sum = *n + g * g;
  FtrlColumn(by, ::powf(*n, power), ::powf(sum, power), g, w, z);
  *n = sum;
}

#if !defined(__CUDACC_RTC__)
struct StepInput {
  float learning_rate;
  int64_t step;  // 1 for the first update; Adam corrects its bias by it
};

// 1 - (1 - x)^t without the cancellation of small x: Adam's first steps divide by it.
inline double OneMinusPower(float x, int64_t t) {
  return -std::expm1(static_cast<double>(t) * std::log1p(-double{x}));
}

// `step.step` must be at least 1 (the caller checks: Adam divides by 0 at step 0).
inline Prepared PrepareStep(const UpdateRule& rule, const StepInput& step) {
  const float lr = step.learning_rate;
  switch (rule.rule) {
    case RuleKind::kAdam:
    case RuleKind::kAdamW: {
      const double first = OneMinusPower(rule.one_minus_beta_1, step.step);
      const double second = OneMinusPower(rule.one_minus_beta_2, step.step);
      return {lr, static_cast<float>(lr * std::sqrt(second) / first), lr * rule.weight_decay};
    }
    case RuleKind::kFtrl:
      return {lr, 1 / lr, 2 * rule.l2 + rule.beta / lr};
    default:
      return {lr, 0, 0};
  }
}
#endif

}  // namespace fusedrec
