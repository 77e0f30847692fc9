#include "hash_table/cpu/parts/gradient_sum.h"

#include "common/simd.h"

namespace fusedrec {
namespace {

FUSEDREC_CLONES void Scale(const float* __restrict__ from, float scale, int n, float* __restrict__ to) {
  for (int i = 0; i < n; ++i) to[i] = from[i] * scale;
}

FUSEDREC_CLONES void AddScaled(const float* __restrict__ from, float scale, int n, float* __restrict__ to) {
  for (int i = 0; i < n; ++i) to[i] += from[i] * scale;
}

// Without a branch, so that the loop vectorizes.
FUSEDREC_CLONES uint32_t AnyNotFinite(const float* __restrict__ x, int n) {
  uint32_t any = 0;
  for (int i = 0; i < n; ++i) any |= IsFinite(x[i]) ? 0 : 1;
  return any;
}

}  // namespace

bool AllFinite(const float* x, int n) { return AnyNotFinite(x, n) == 0; }

GradientSum::GradientSum(const Gradients& in, int dim)
    : begin_(in.handles.size() + 1, 0), grads_(static_cast<const char*>(in.grads)), storage_(in.storage), dim_(dim),
      scale_(in.scale) {
  const absl::Span<const int32_t> terms = in.sums.index;
  order_.resize(terms.empty() ? in.inverse.size() : terms.size());
  // Counting sort. Counts stand one place later, so that placing turns them into the begins.
  const auto row_of = [&](int64_t n) { return in.inverse[terms.empty() ? n : terms[n]]; };
  for (size_t n = 0; n < order_.size(); ++n) ++begin_[row_of(n)];
  int32_t end = 0;
  for (int32_t& begin : begin_) begin = end += begin;
  int64_t sum = static_cast<int64_t>(in.sums.splits.size()) - 2;
  for (int64_t n = static_cast<int64_t>(order_.size()) - 1; n >= 0; --n) {
    while (!terms.empty() && n < in.sums.splits[sum]) --sum;
    order_[--begin_[row_of(n)]] = static_cast<int32_t>(terms.empty() ? n : sum);
  }
}

void GradientSum::Prefetch(int64_t number) const {
  for (int32_t place = begin_[number]; place < begin_[number + 1]; ++place) {
    const char* from = Gradient(place);
    for (int offset = 0; offset < dim_ * BytesOf(storage_); offset += 64) __builtin_prefetch(from + offset);
  }
}

void GradientSum::Sum(int64_t number, float* sum) const {
  if (IsEmpty(number)) std::fill_n(sum, dim_, 0.0f);
  constexpr int kPiece = 256;
  float wide[kPiece];
  for (int first = 0; first < dim_; first += kPiece) {
    const int n = dim_ - first < kPiece ? dim_ - first : kPiece;
    for (int32_t place = begin_[number]; place < begin_[number + 1]; ++place) {
      const char* from = Gradient(place) + static_cast<int64_t>(first) * BytesOf(storage_);
      const float* values = reinterpret_cast<const float*>(from);
      if (storage_ != Storage::kFloat32) {
        Convert(from, storage_, n, Storage::kFloat32, wide);
        values = wide;
      }
      (place == begin_[number] ? Scale : AddScaled)(values, scale_, n, sum + first);
    }
  }
}

}  // namespace fusedrec
