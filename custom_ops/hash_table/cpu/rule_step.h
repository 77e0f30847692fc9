// One step of an update rule on rows in host memory: a row, its summed gradient and its slots in, the row after the step
// out, in one pass.
#pragma once

#include "hash_table/rules/rules.h"

namespace fusedrec {

class RuleStep {
 public:
  RuleStep(const AnyRule& rule, const Step& step);

  // Trains one row.
  //   grad     [dim]           the summed gradient; clipping writes into it
  //   row      [dim]           w
  //   wide     [slots * dim]   slot after slot
  //   scalars  [row slots]
  //
  // The four do not overlap. Slots that the rule lacks may be null.
  void Train(int dim, float* grad, float* row, float* wide, float* scalars) const;

 private:
  template <class R>
  struct Of {
    R rule;
    typename R::Numbers by;
    bool leaves_rows;
  };
  template <class... R>
  static std::variant<Of<R>...> VariantOf(const std::variant<R...>&);

  decltype(VariantOf(AnyRule())) of_;
};

}  // namespace fusedrec
