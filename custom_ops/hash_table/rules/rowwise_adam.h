#pragma once

#include "hash_table/rules/adam.h"

namespace fusedrec {

// Adam with one v per row: v += (1 - beta_2)(|g|^2 / D - v);  m and w as in adam.h.
// (FBGEMM's PARTIAL_ROWWISE_ADAM; its epsilon is outside the bias correction, ours is Adam's epsilon hat.)
struct RowwiseAdam : Adam {
  static constexpr const char* kName = "rowwise_adam";
  static constexpr int kSlots = 1, kRowSlots = 1;  // m; v

  // The rate of the row's columns is rate / (sqrt(v) + epsilon).
  FUSEDREC_COLUMN Numbers OfRow(const Numbers& by, float squares, int dim, float* slots) const {
    float& v = slots[0];
    v += (squares / static_cast<float>(dim) - v) * by.one_minus_beta_2;
    return {by.rate / (::sqrtf(v) + by.epsilon), by.decay, by.one_minus_beta_1, 0, 0};
  }
  template <bool>
  static FUSEDREC_COLUMN void Column(const Numbers& by, float g, float& w, float* slots) {
    float& m = slots[0];
    m += (g - m) * by.one_minus_beta_1;
    w = (w - w * by.decay) - m * by.rate;
  }
};

}  // namespace fusedrec
