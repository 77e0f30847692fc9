#pragma once

#include "hash_table/rules/rule.h"

namespace fusedrec {

// v += (1 - rho)(g^2 - v); a step by v. (Tieleman and Hinton, 2012)
struct Rmsprop : Rule {
  static constexpr const char* kName = "rmsprop";
  static constexpr int kSlots = 1;  // v

  float one_minus_rho = 0, epsilon = 0;
  bool epsilon_inside = false;

  template <class Visit>
  void Parameters(Visit&& visit) {
    Rule::Parameters(visit);
    visit("one_minus_rho", one_minus_rho, Range{0, 1});
    visit("epsilon", epsilon, Range());
    visit("epsilon_inside", epsilon_inside);
  }
  FUSEDREC_HOST_DEVICE bool form() const { return epsilon_inside; }

  struct Numbers {
    float rate, one_minus_rho, epsilon;
  };
  Numbers Prepare(const Step& step) const { return {step.learning_rate, one_minus_rho, epsilon}; }
  template <bool kInside>
  static FUSEDREC_COLUMN void Column(const Numbers& by, float g, float& w, float* slots) {
    float& v = slots[0];
    v += (g * g - v) * by.one_minus_rho;
    ScaledColumn<kInside>(by.rate, by.epsilon, v, g, w);
  }
};

}  // namespace fusedrec
