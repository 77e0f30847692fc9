// An update rule: what its header says, and no other file.
//
// g is the gradient of a row, summed over everything that looked it up in this step, w the row, lr the learning rate. Every
// rule first clips g to the L2 norm `clipnorm`. The norm is that of one row, so clipping depends neither on the batch, nor
// on the ranks, nor on the grouping of tables. Keras clips a whole variable.
//
// All arithmetic is float32 in the order written, whatever the table stores. Both compilers read these headers, so a row
// has the same bits on every instruction set and on a GPU (but for FTRL's powf).
#pragma once

#include <cmath>

#include "common/host_device.h"

namespace fusedrec {

#define FUSEDREC_COLUMN FUSEDREC_HOST_DEVICE inline __attribute__((always_inline))

struct Step {
  float learning_rate;
  int64_t number;  // 1 for the first update; Adam divides by 0 at 0
};

struct Range {
  float least = 0, most = 3.40282347e38f;
};
constexpr Range kFinite{-3.40282347e38f, 3.40282347e38f}, kPositive{1.17549435e-38f, 3.40282347e38f};

// A rule adds to this: its name; Parameters; Numbers, which all rows of a step share, and Prepare; Column, which trains one
// column w with its slots. With row slots, also OfRow, which trains the row slots by the sum of squares of g, and returns
// the numbers for the columns of this row.
struct Rule {
  static constexpr int kSlots = 0, kRowSlots = 0;  // numbers of optimizer state per column; per row

  float clipnorm = 0;  // 0: no limit

  // visit(name, member, range) and visit(name, bool member), in the order of records.
  template <class Visit>
  void Parameters(Visit&& visit) {
    visit("clipnorm", clipnorm, Range());
  }
  float SlotStart(int) const { return 0; }                    // of slot k of a new row; row slots follow the slots
  FUSEDREC_HOST_DEVICE bool form() const { return false; }    // which of the two Columns; the loop has no branch
  static bool LeavesRows(const Step&) { return false; }       // whether the step changes nothing
};

constexpr float kSmallestSquares = 1e-30f, kLargestSquares = 1e30f;  // sums that float holds to full precision

// w -= lr g / (sqrt(v) + epsilon), or lr g / sqrt(v + epsilon)
template <bool kInside>
FUSEDREC_COLUMN void ScaledColumn(float lr, float epsilon, float v, float g, float& w) {
  w -= lr * g / (kInside ? ::sqrtf(v + epsilon) : ::sqrtf(v) + epsilon);
}

}  // namespace fusedrec
