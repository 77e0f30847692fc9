#pragma once

#include "hash_table/rules/rule.h"

namespace fusedrec {

// With power(n) = n^-learning_rate_power:
//   n' = n + g^2;  z += g + 2 shrinkage w - (power(n') - power(n)) / lr w
//   w = (z clipped to [-l1, l1] - z) / (power(n') / lr + 2 l2 + beta / lr)
// (McMahan et al., KDD 2013, Algorithm 1; shrinkage as in Keras)
struct Ftrl : Rule {
  static constexpr const char* kName = "ftrl";
  static constexpr int kSlots = 2;  // n, z

  float initial_accumulator_value = 0, learning_rate_power = 0, l1 = 0, l2 = 0, l2_shrinkage = 0, beta = 0;

  template <class Visit>
  void Parameters(Visit&& visit) {
    Rule::Parameters(visit);
    visit("initial_accumulator_value", initial_accumulator_value, Range());
    visit("learning_rate_power", learning_rate_power, Range{kFinite.least, 0});
    visit("l1", l1, Range());
    visit("l2", l2, Range());
    visit("l2_shrinkage", l2_shrinkage, Range());
    visit("beta", beta, Range());
  }
  float SlotStart(int slot) const { return slot == 0 ? initial_accumulator_value : 0; }
  FUSEDREC_HOST_DEVICE bool form() const { return learning_rate_power == -0.5f; }  // a root, which vectorizes; else powf
  // The formula divides by the rate. A rate of 0, with which schedules begin, leaves rows unchanged.
  static bool LeavesRows(const Step& step) { return step.learning_rate == 0; }

  struct Numbers {
    float inverse_rate, power, l1, l2_term, shrinkage;
  };
  Numbers Prepare(const Step& step) const {
    const float lr = step.learning_rate;
    return {1 / lr, -learning_rate_power, l1, 2 * l2 + beta / lr, l2_shrinkage};
  }
  template <bool kRoot>
  static FUSEDREC_COLUMN void Column(const Numbers& by, float g, float& w, float* slots) {
    float &n = slots[0], &z = slots[1];
    const float sum = n + g * g;
    const float before = kRoot ? ::sqrtf(n) : ::powf(n, by.power);
    const float after = kRoot ? ::sqrtf(sum) : ::powf(sum, by.power);
    z += g + 2 * by.shrinkage * w - (after - before) * by.inverse_rate * w;
    // Without branches, so that the loop vectorizes. A column that never had a gradient is 0 / kSmallest, not 0 / 0.
    constexpr float kSmallest = 1.17549435e-38f;  // the smallest normal number
    const float divisor = after * by.inverse_rate + by.l2_term;
    const float quadratic = divisor < kSmallest ? kSmallest : divisor;
    const float low = z < -by.l1 ? -by.l1 : z;
    w = ((by.l1 < low ? by.l1 : low) - z) / quadratic;
    n = sum;
  }
};

}  // namespace fusedrec
