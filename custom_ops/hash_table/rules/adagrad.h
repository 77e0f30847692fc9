#pragma once

#include "hash_table/rules/sgd.h"

namespace fusedrec {

// v += g^2; a step by v + offset. (Duchi et al., JMLR 2011, diagonal form)
// For a moment scale c the offset is (c - 1) v0: c (v0 + (v - v0) / c) = v + (c - 1) v0. The record scales lr by sqrt(c)
// and epsilon by sqrt(c), or by c inside the root.
struct Adagrad : Rule {
  static constexpr const char* kName = "adagrad";
  static constexpr int kSlots = 1;  // v

  float initial_accumulator_value = 0, epsilon = 0;
  bool epsilon_inside = false;
  float moment_offset = 0;

  template <class Visit>
  void Parameters(Visit&& visit) {
    Rule::Parameters(visit);
    visit("initial_accumulator_value", initial_accumulator_value, Range());
    visit("epsilon", epsilon, Range());
    visit("epsilon_inside", epsilon_inside);
    visit("moment_offset", moment_offset, kFinite);
  }
  float SlotStart(int) const { return initial_accumulator_value; }
  FUSEDREC_HOST_DEVICE bool form() const { return epsilon_inside; }

  struct Numbers {
    float rate, epsilon, offset;
  };
  Numbers Prepare(const Step& step) const { return {step.learning_rate, epsilon, moment_offset}; }
  template <bool kInside>
  static FUSEDREC_COLUMN void Column(const Numbers& by, float g, float& w, float* slots) {
    float& v = slots[0];
    v += g * g;
    ScaledColumn<kInside>(by.rate, by.epsilon, v + by.offset, g, w);
  }
};

// v += |g|^2, or |g|^2 / D, one number per row;  w -= lr g / (sqrt(u) + epsilon), or lr g / sqrt(u + epsilon), for
// u = v0 + (v - v0) / c. The moment scale c divides what gradients have added, not the initial v0. (2D sparse parallelism,
// Algorithm 1, lines 5 and 6)
struct RowwiseAdagrad : Sgd {
  static constexpr const char* kName = "rowwise_adagrad";
  static constexpr int kRowSlots = 1;  // v

  float initial_accumulator_value = 0, epsilon = 0;
  bool epsilon_inside = false, mean = false;
  float moment_scale = 1;

  template <class Visit>
  void Parameters(Visit&& visit) {
    Rule::Parameters(visit);
    visit("initial_accumulator_value", initial_accumulator_value, Range());
    visit("epsilon", epsilon, Range());
    visit("epsilon_inside", epsilon_inside);
    visit("mean", mean);
    visit("moment_scale", moment_scale, kPositive);
  }
  float SlotStart(int) const { return initial_accumulator_value; }

  FUSEDREC_COLUMN Numbers OfRow(const Numbers& by, float squares, int dim, float* slots) const {
    float& v = slots[0];
    v += mean ? squares / static_cast<float>(dim) : squares;
    // The form keeps the bits of v where c = 1.
    const float scaled = v / moment_scale + (initial_accumulator_value - initial_accumulator_value / moment_scale);
    return {by.rate / (epsilon_inside ? ::sqrtf(scaled + epsilon) : ::sqrtf(scaled) + epsilon)};
  }
};

}  // namespace fusedrec
