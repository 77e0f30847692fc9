// Gradients of one row, from all that received it, summed in float32 in the order received (deterministic).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "hash_table/cpu/rows/row_format.h"

namespace fusedrec {

// Returns whether all of x [n] are finite numbers.
bool AllFinite(const float* x, int n);

class GradientSum {
 public:
  // inverse [V]: number in [0, num_rows) of the row of each received gradient; grads [>= V, dim] of `storage`.
  GradientSum(absl::Span<const int32_t> inverse, int64_t num_rows, const void* grads, Storage storage, int dim,
              float scale);

  // Returns whether row `number` has no gradient.
  bool IsEmpty(int64_t number) const { return begin_[number] == begin_[number + 1]; }
  // Asks for the gradients of row `number`.
  void Prefetch(int64_t number) const;
  // sum [dim] = scale * (gradients of row `number`)
  void Sum(int64_t number, float* sum) const;

 private:
  const char* Gradient(int64_t place) const {
    return grads_ + static_cast<int64_t>(order_[place]) * dim_ * BytesOf(storage_);
  }
  std::vector<int32_t> begin_;  // [num_rows + 1] places in order_
  std::vector<int32_t> order_;  // [V] received positions, by row
  const char* grads_;
  Storage storage_;
  int dim_;
  float scale_;
};

}  // namespace fusedrec
