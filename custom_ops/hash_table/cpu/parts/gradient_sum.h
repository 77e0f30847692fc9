// Sums of gradients by row: of one message, and over several until their update.
#pragma once

#include "common/hash.h"
#include "hash_table/cpu/rows/key_index.h"
#include "hash_table/cpu/rows/row_format.h"
#include "hash_table/table.h"

namespace fusedrec {

bool AllFinite(const float* x, int n);

// Gradients of one row, from all that received it, summed in float32 in the order received (deterministic).
class GradientSum {
 public:
  // in: checked. Its inverse [V] has the place in handles of the row of each gradient.
  GradientSum(const Gradients& in, int dim);

  bool IsEmpty(int64_t number) const { return begin_[number] == begin_[number + 1]; }
  void Prefetch(int64_t number) const;
  // sum [dim] = scale * (gradients of row `number`)
  void Sum(int64_t number, float* sum) const;

 private:
  const char* Gradient(int64_t place) const {
    return grads_ + static_cast<int64_t>(order_[place]) * dim_ * BytesOf(storage_);
  }
  std::vector<int32_t> begin_;  // [num_rows + 1] places in order_
  std::vector<int32_t> order_;  // [V] received positions, by row; [T] those of the sums that a row is a term of
  const char* grads_;
  Storage storage_;
  int dim_;
  float scale_;
};

// Gradients that wait for their update: sums by row over several batches (MTGRBoost, section 5.2). Sparse: rows that no
// batch touched take no space.
class Accumulator {
 public:
  explicit Accumulator(int dim) : dim_(dim) {}

  // Numbers of the sums of these handles. Where `makes` says so, a new one is made, of zeros. -1: there is none; negative
  // handles have none.
  absl::Status Number(absl::Span<const int64_t> handles, absl::Span<const uint8_t> makes, std::vector<int64_t>* numbers) {
    numbers->assign(handles.size(), -1);
    FUSEDREC_TRY(index_.Reserve(std::count(makes.begin(), makes.end(), 1)));
    for (size_t i = 0; i < handles.size(); ++i) {
      if (handles[i] < 0 || (makes[i] == 0 && handles_.empty())) continue;
      const int64_t row = static_cast<uint32_t>(handles[i]);  // without the clock that the op puts above it
      const uint64_t hash = TableHash(row);
      uint32_t number = index_.Find(row, hash);
      if (number == kAbsent) {
        if (makes[i] == 0) continue;
        number = static_cast<uint32_t>(handles_.size());
        index_.Insert(row, hash, number);
        handles_.push_back(static_cast<uint32_t>(row));
      }
      (*numbers)[i] = number;
    }
    sums_.resize(handles_.size() * dim_, 0.0f);
    left_out_.resize(handles_.size(), 0);
    return absl::OkStatus();
  }

  float* Sum(int64_t number) { return &sums_[number * dim_]; }
  // A flag: the sum is not finite, so the update leaves its row unchanged.
  uint8_t* LeftOut(int64_t number) { return &left_out_[number]; }
  const std::vector<uint32_t>& handles() const { return handles_; }

  void Clear() {
    index_.Clear();
    handles_.clear();
    sums_.clear();
    left_out_.clear();
  }

 private:
  const int dim_;
  KeyIndex index_;  // handle -> number
  std::vector<uint32_t> handles_;
  std::vector<float> sums_;  // [numbers, dim]
  std::vector<uint8_t> left_out_;  // [numbers]; bytes, which threads may write side by side
};

}  // namespace fusedrec
