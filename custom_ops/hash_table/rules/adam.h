#pragma once

#include "hash_table/rules/rule.h"

namespace fusedrec {

// w -= lr weight_decay w;  m += (1 - beta_1)(g - m);  v += (1 - beta_2)(g^2 - v);  w -= rate m / (sqrt(v) + epsilon)
// (Kingma and Ba, ICLR 2015, in the order just before section 2.1; Loshchilov and Hutter, ICLR 2019, Algorithm 2)
// Without weight_decay it is Adam, with it AdamW.
struct Adam : Rule {
  static constexpr const char* kName = "adam";
  static constexpr int kSlots = 2;  // m, v

  // A float holds 1 - 0.999 to eight digits, but 0.999 leaves only five digits of 1 - 0.999.
  float one_minus_beta_1 = 0, one_minus_beta_2 = 0, epsilon = 0, weight_decay = 0;

  template <class Visit>
  void Parameters(Visit&& visit) {
    Rule::Parameters(visit);
    visit("one_minus_beta_1", one_minus_beta_1, kPositive);
    visit("one_minus_beta_2", one_minus_beta_2, kPositive);
    visit("epsilon", epsilon, Range());
    visit("weight_decay", weight_decay, Range());
  }

  struct Numbers {
    float rate, decay, one_minus_beta_1, one_minus_beta_2, epsilon;
  };
  Numbers Prepare(const Step& step) const {
    // 1 - (1 - x)^t without the cancellation of small x, because the first steps divide by it.
    const auto one_minus_power = [&](float x) {
      return -::expm1(static_cast<double>(step.number) * ::log1p(-static_cast<double>(x)));
    };
    const double first = one_minus_power(one_minus_beta_1), second = one_minus_power(one_minus_beta_2);
    const float lr = step.learning_rate;
    return {static_cast<float>(lr * ::sqrt(second) / first), lr * weight_decay, one_minus_beta_1, one_minus_beta_2,
            epsilon};
  }
  template <bool>
  static FUSEDREC_COLUMN void Column(const Numbers& by, float g, float& w, float* slots) {
    float &m = slots[0], &v = slots[1];
    m += (g - m) * by.one_minus_beta_1;
    v += (g * g - v) * by.one_minus_beta_2;
    w = (w - w * by.decay) - m * by.rate / (::sqrtf(v) + by.epsilon);
  }
};

}  // namespace fusedrec
