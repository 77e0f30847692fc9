// The numbers that a 16-bit type can hold, by its definition, in double: what conversions are compared with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

#include "hash_table/cpu/rows/row_format.h"

namespace fusedrec {

class Grid {
 public:
  explicit Grid(Storage storage)
      : storage_(storage), fraction_bits_(storage == Storage::kFloat16 ? 10 : 7),
        exponent_bits_(storage == Storage::kFloat16 ? 5 : 8) {
    for (uint32_t bits = 0; bits < FirstInfinite(); ++bits) values_.push_back(ValueOf(static_cast<uint16_t>(bits)));
  }

  Storage storage() const { return storage_; }
  // Bits of positive infinity; the patterns below are the finite numbers from 0 upwards.
  uint16_t FirstInfinite() const { return static_cast<uint16_t>(((1 << exponent_bits_) - 1) << fraction_bits_); }
  double Largest() const { return values_.back(); }

  // The value of any pattern, infinities and not-a-numbers included.
  double ValueOf(uint16_t bits) const {
    const int exponent_mask = (1 << exponent_bits_) - 1;
    const int exponent = (bits >> fraction_bits_) & exponent_mask, fraction = bits & ((1 << fraction_bits_) - 1);
    const int bias = exponent_mask / 2;
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    if (exponent == exponent_mask) return fraction == 0 ? sign * HUGE_VAL : std::nan("");
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits_);
    return sign * std::ldexp((1 << fraction_bits_) + fraction, exponent - bias - fraction_bits_);
  }

  // The largest finite grid number at most |x|, as its pattern without sign.
  uint16_t Below(double x) const {
    const auto above = std::upper_bound(values_.begin(), values_.end(), std::abs(x));
    return static_cast<uint16_t>(std::distance(values_.begin(), above) - 1);
  }

  // The nearest number, ties to the even pattern. Beyond the largest, float16 stays there (an infinite row could never
  // come back); bfloat16, whose largest is almost that of float32, rounds to infinity as IEEE 754 says.
  uint16_t Nearest(double x) const {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0, below = Below(x);
    const double up = below + 1 < FirstInfinite() ? values_[below + 1] : std::ldexp(1.0, 1 << (exponent_bits_ - 1));
    const double from_below = std::abs(x) - values_[below], to_above = up - std::abs(x);
    const bool goes_up = to_above < from_below || (to_above == from_below && below % 2 == 1);
    const int rounded = below + (goes_up ? 1 : 0);
    return sign | static_cast<uint16_t>(storage_ == Storage::kFloat16 ? std::min(rounded, FirstInfinite() - 1) : rounded);
  }

  const std::vector<double>& values() const { return values_; }  // finite, from 0 upwards

 private:
  Storage storage_;
  int fraction_bits_, exponent_bits_;
  std::vector<double> values_;
};

inline float FloatOfBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t BitsOfFloat(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

}  // namespace fusedrec
