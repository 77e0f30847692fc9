#include "hash_table/cpu/rule_step.h"

#include "common/simd.h"

namespace fusedrec {
namespace {

// Sum of squares, as 16 sums of every 16th column, added in pairs. One vector of AVX-512 or four of the baseline do the
// same additions in the same order. Inlined into each clone of its callers.
inline __attribute__((always_inline)) float SumOfSquares(const float* __restrict__ x, int n) {
  constexpr int kParts = 16;
  float part[kParts] = {};
  int d = 0;
  for (; d + kParts <= n; d += kParts) {
    for (int j = 0; j < kParts; ++j) part[j] += x[d + j] * x[d + j];
  }
  for (int j = 0; j < n - d; ++j) part[j] += x[d + j] * x[d + j];
  float eight[8], four[4];  // a loop over the sizes would keep the parts in memory
  for (int j = 0; j < 8; ++j) eight[j] = part[j] + part[j + 8];
  for (int j = 0; j < 4; ++j) four[j] = eight[j] + eight[j + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// The norm where float squares overflow or vanish.
float NormInDouble(const float* x, int n) {
  double sum = 0;
  for (int d = 0; d < n; ++d) sum += static_cast<double>(x[d]) * x[d];
  return static_cast<float>(std::sqrt(sum));
}

FUSEDREC_CLONES void Clip(float clipnorm, int n, float* __restrict__ g) {
  const float squares = SumOfSquares(g, n);
  const float norm = squares > kSmallestSquares && squares < kLargestSquares ? std::sqrt(squares) : NormInDouble(g, n);
  if (!(norm > clipnorm)) return;
  const float scale = clipnorm / norm;
  for (int d = 0; d < n; ++d) g[d] *= scale;
}

// w [dim] and its slots of dim numbers each. Two pointers: of one with a distance the compiler would test for overlap.
template <bool kForm, class R>
inline __attribute__((always_inline)) void Columns(const typename R::Numbers& by, int dim, const float* __restrict__ g,
    float* __restrict__ w, float* __restrict__ first, float* __restrict__ second) {
  for (int d = 0; d < dim; ++d) {
    float slots[2] = {R::kSlots > 0 ? first[d] : 0.0f, R::kSlots > 1 ? second[d] : 0.0f};
    R::template Column<kForm>(by, g[d], w[d], slots);
    if (R::kSlots > 0) first[d] = slots[0];
    if (R::kSlots > 1) second[d] = slots[1];
  }
}

template <class R>
inline __attribute__((always_inline)) void Columns(const R& rule, const typename R::Numbers& by, int dim,
    const float* __restrict__ g, float* __restrict__ w, float* __restrict__ first, float* __restrict__ second) {
  if (rule.form()) {
    Columns<true, R>(by, dim, g, w, first, second);
  } else {
    Columns<false, R>(by, dim, g, w, first, second);
  }
}

// The numbers of a step are read where they are: a copy of five floats costs a row of 16 columns a tenth of its time.
template <class R>
inline __attribute__((always_inline)) void Train(const R& rule, const typename R::Numbers& by, int dim,
    const float* __restrict__ g, float* __restrict__ w, float* __restrict__ first, float* __restrict__ second,
    float* __restrict__ row_slots) {
  if constexpr (R::kRowSlots > 0) {
    const typename R::Numbers of_row = rule.OfRow(by, SumOfSquares(g, dim), dim, row_slots);
    Columns(rule, of_row, dim, g, w, first, second);
  } else {
    Columns(rule, by, dim, g, w, first, second);
  }
}

// A function for each rule, because clones of templates do not exist.
#define FUSEDREC_TRAIN_ROW(R)                                                                                            \
  FUSEDREC_CLONES void TrainRow(const R& rule, const R::Numbers& by, int dim, const float* __restrict__ g,               \
                                float* __restrict__ w, float* __restrict__ first, float* __restrict__ second,            \
                                float* __restrict__ row_slots) {                                                         \
    Train(rule, by, dim, g, w, first, second, row_slots);                                                                \
  }
FUSEDREC_RULES(FUSEDREC_TRAIN_ROW)
#undef FUSEDREC_TRAIN_ROW

}  // namespace

RuleStep::RuleStep(const AnyRule& rule, const Step& step)
    : of_(std::visit(
          [&step](const auto& r) -> decltype(of_) {
            return Of<std::decay_t<decltype(r)>>{r, r.Prepare(step), r.LeavesRows(step)};
          },
          rule)) {}

void RuleStep::Train(int dim, float* grad, float* row, float* wide, float* scalars) const {
  std::visit(
      [=](const auto& of) {
        if (of.leaves_rows) return;
        if (of.rule.clipnorm > 0) Clip(of.rule.clipnorm, dim, grad);
        TrainRow(of.rule, of.by, dim, grad, row, wide, wide + dim, scalars);
      },
      of_);
}

}  // namespace fusedrec
