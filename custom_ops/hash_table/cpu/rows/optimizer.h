// Update rules of the table: one row, its summed gradient and its slots in, the row after the step out, in one pass.
//
// # Rules
// g is the gradient of the row, summed over everything that looked it up in this step, w the row, lr the learning rate
// of the step, t its number, 1 for the first. Every rule begins by clipping g to the L2 norm `clipnorm` (0: off). The
// norm is that of one row, so that clipping depends neither on the batch, nor on the ranks, nor on which tables
// are fused; Keras clips a whole variable, which a table that is never seen whole does not have.
//
//   rule             hyperparameters, in this order, after clipnorm             slots: element-wise | row-wise
//   sgd              -                                                          - | -
//   momentum         momentum, nesterov                                         m | -
//   adagrad          initial_accumulator_value, epsilon, epsilon_inside,        v | -
//                    moment_offset
//   rowwise_adagrad  initial_accumulator_value, epsilon, epsilon_inside,        - | v
//                    mean, moment_scale
//   rmsprop          1 - rho, epsilon, epsilon_inside                           v | -
//   adam             1 - beta_1, 1 - beta_2, epsilon                            m, v | -
//   adamw            1 - beta_1, 1 - beta_2, epsilon, weight_decay              m, v | -
//   ftrl             initial_accumulator_value, learning_rate_power, l1, l2,    n, z | -
//                    l2_shrinkage, beta
//
// nesterov, epsilon_inside and mean are 0 or 1. Adam takes 1 - beta, because the first moments are divided by it. A
// float holds 1 - 0.999 to eight digits, but 0.999 leaves only five digits of 1 - 0.999. The formulas stand in
// update_rule.h, with their sources. The records of tf_fusedrec/optimizers (sgd.py, adagrad.py, adam.py, ftrl.py) have
// them, too.
//
// All arithmetic is float32, whatever the table stores. A row gives the same bits on every instruction set (simd.h).
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "hash_table/update_rule.h"

namespace fusedrec {

class Optimizer {
 public:
  // Refuses rules that are not in the table above, and hyperparameters that are too few, too many or not finite.
  static absl::StatusOr<Optimizer> Make(const std::string& rule, absl::Span<const float> hyperparameters);

  const UpdateRule& rule() const { return rule_; }
  int wide_slots() const { return SlotsOf(rule_.rule).wide; }      // element-wise slots, D values each
  int scalar_slots() const { return SlotsOf(rule_.rule).scalar; }  // row-wise slots, one float each
  // Value of slot k of a row that was never trained.
  float slot_start(int k) const { return k == 0 ? rule_.initial_accumulator_value : 0.0f; }

  // `step.step` must be at least 1.
  Prepared Prepare(const StepInput& step) const { return PrepareStep(rule_, step); }

  // Trains one row.
  //
  //   grad     [dim]               the summed gradient; clipping writes into it
  //   row      [dim]               w
  //   wide     [wide_slots * dim]  slot after slot
  //   scalars  [scalar_slots]
  //
  // The four do not overlap. Slots that the rule lacks may be null.
  void Update(const Prepared& prepared, int dim, float* grad, float* row, float* wide, float* scalars) const;

 private:
  Optimizer() = default;

  UpdateRule rule_;
};

}  // namespace fusedrec
