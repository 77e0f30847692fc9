#pragma once

#include "hash_table/rules/rule.h"

namespace fusedrec {

// w -= lr g
struct Sgd : Rule {
  static constexpr const char* kName = "sgd";

  struct Numbers {
    float rate;
  };
  Numbers Prepare(const Step& step) const { return {step.learning_rate}; }
  template <bool>
  static FUSEDREC_COLUMN void Column(const Numbers& by, float g, float& w, float*) {
    w -= by.rate * g;
  }
};

// m = mu m - lr g;  w += m, or with Nesterov's look-ahead w += mu m - lr g. (Keras; Sutskever et al., ICML 2013)
struct Momentum : Rule {
  static constexpr const char* kName = "momentum";
  static constexpr int kSlots = 1;  // m

  float momentum = 0;
  bool nesterov = false;

  template <class Visit>
  void Parameters(Visit&& visit) {
    Rule::Parameters(visit);
    visit("momentum", momentum, Range{0, 1});
    visit("nesterov", nesterov);
  }
  FUSEDREC_HOST_DEVICE bool form() const { return nesterov; }

  struct Numbers {
    float rate, momentum;
  };
  Numbers Prepare(const Step& step) const { return {step.learning_rate, momentum}; }
  template <bool kNesterov>
  static FUSEDREC_COLUMN void Column(const Numbers& by, float g, float& w, float* slots) {
    float& m = slots[0];
    m = by.momentum * m - by.rate * g;
    w += kNesterov ? by.momentum * m - by.rate * g : m;
  }
};

}  // namespace fusedrec
