// 16-bit numbers: every pattern widens to its value and narrows back to itself; every float32 goes to its nearest
// neighbour, ties to even. The oracle is the definition of the types, in double.
#include "hash_table/cpu/rows/row_format.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "check.h"

namespace fusedrec {
namespace {

// The numbers that a 16-bit type can hold, by its definition, in double.
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

float FloatOfBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

uint32_t BitsOfFloat(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

std::vector<float> Widened(const std::vector<uint16_t>& bits, Storage storage) {
  std::vector<float> wide(bits.size());
  Convert(bits.data(), storage, bits.size(), Storage::kFloat32, wide.data());
  return wide;
}

std::vector<uint16_t> Narrowed(const std::vector<float>& numbers, Storage storage) {
  std::vector<uint16_t> bits(numbers.size());
  Convert(numbers.data(), Storage::kFloat32, numbers.size(), storage, bits.data());
  return bits;
}

void EveryPattern(const Grid& grid) {
  std::vector<uint16_t> bits(65536);
  for (int i = 0; i < 65536; ++i) bits[i] = static_cast<uint16_t>(i);
  const std::vector<float> wide = Widened(bits, grid.storage());
  const std::vector<uint16_t> back = Narrowed(wide, grid.storage());
  const bool saturates = grid.storage() == Storage::kFloat16;
  for (int i = 0; i < 65536; ++i) {
    const double value = grid.ValueOf(bits[i]);
    if (std::isnan(value)) {
      CHECK(std::isnan(wide[i]), "pattern ", i);
      CHECK(std::isnan(grid.ValueOf(back[i])), "pattern ", i);
      continue;
    }
    CHECK_EQ(static_cast<double>(wide[i]), value, "pattern ", i);
    CHECK_EQ(std::signbit(wide[i]), std::signbit(value), "pattern ", i);
    const int wanted = std::isinf(value) && saturates ? i - 1 : i;
    CHECK_EQ(static_cast<int>(back[i]), wanted, "pattern ", i);
  }
}

// Returns numbers at which rounding decides: grid numbers, the middles between them, and their float32 neighbours;
// numbers beyond the largest; and random patterns of float32, subnormal ones included.
std::vector<float> Interesting(const Grid& grid) {
  std::vector<float> numbers = {std::numeric_limits<float>::max(), std::numeric_limits<float>::min(),
                                std::numeric_limits<float>::denorm_min(), 65504.0f, 65519.99f, 65520.0f, 70000.0f, 0.0f,
                                FloatOfBits(0x7f7f7fff), FloatOfBits(0x7f7f8000), FloatOfBits(0x7f7f8001)};
  const std::vector<double>& values = grid.values();
  for (size_t i = 0; i + 1 < values.size(); ++i) {
    for (const double x : {values[i], (values[i] + values[i + 1]) / 2}) {
      const float centre = static_cast<float>(x);
      for (const float near : {centre, std::nextafter(centre, HUGE_VALF), std::nextafter(centre, 0.0f)}) {
        numbers.push_back(near);
      }
    }
  }
  std::mt19937 random(4);
  for (int i = 0; i < 200'000; ++i) {
    const float x = FloatOfBits(static_cast<uint32_t>(random()));
    if (std::isfinite(x)) numbers.push_back(x);
  }
  const size_t positive = numbers.size();
  for (size_t i = 0; i < positive; ++i) numbers.push_back(-numbers[i]);
  return numbers;
}

void NearestEven(const Grid& grid) {
  const std::vector<float> numbers = Interesting(grid);
  const std::vector<uint16_t> got = Narrowed(numbers, grid.storage());
  for (size_t i = 0; i < numbers.size(); ++i) {
    CHECK_EQ(got[i], grid.Nearest(numbers[i]), "of ", numbers[i], " = ", absl::Hex(BitsOfFloat(numbers[i])));
  }
}

void BetweenThe16BitTypes(const Grid& from, const Grid& to) {
  std::vector<uint16_t> bits, got(65536);
  for (int i = 0; i < 65536; ++i) {
    if (std::isfinite(from.ValueOf(static_cast<uint16_t>(i)))) bits.push_back(static_cast<uint16_t>(i));
  }
  Convert(bits.data(), from.storage(), bits.size(), to.storage(), got.data());
  for (size_t i = 0; i < bits.size(); ++i) CHECK_EQ(got[i], to.Nearest(from.ValueOf(bits[i])), "pattern ", bits[i]);
}

// Row, element-wise and row-wise slots lie side by side, with any alignment, and touch nothing else.
void LoadGivesBackWhatStoreTook(Storage storage, int dim, int wide_slots, int scalar_slots) {
  const RowFormat format(storage, dim, wide_slots, scalar_slots, false);
  CHECK_EQ(format.stride() % 4, 0);
  CHECK(format.stride() >= 16 + format.layout().scalars_offset + 4 * format.scalar_slots());
  std::vector<char> rows(3 * format.stride(), 0x5a);
  char* row = rows.data() + format.stride();
  std::vector<float> numbers(format.numbers()), got(format.numbers());
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i) / 4 - 3;  // exact in 16 bits
  numbers.back() = scalar_slots > 0 ? 0.1f : numbers.back();                                // exact in float32 alone
  format.Store(numbers.data(), 7, row);
  format.Load(row, got.data());
  for (size_t i = 0; i < numbers.size(); ++i) CHECK_EQ(got[i], numbers[i], "number ", i);
  for (const Storage to : {Storage::kFloat32, Storage::kBfloat16, Storage::kFloat16}) {
    std::vector<char> copy(4 * dim);
    std::vector<float> wide(dim);
    format.CopyRow(row, to, copy.data());
    Convert(copy.data(), to, dim, Storage::kFloat32, wide.data());
    for (int d = 0; d < dim; ++d) CHECK_EQ(wide[d], numbers[d], "column ", d);
  }
  for (int i = 0; i < 16; ++i) CHECK_EQ(int{row[i]}, 0x5a, "the header is not Store's");
  for (int i = 0; i < format.stride(); ++i) {
    CHECK_EQ(int{rows[i]}, 0x5a, "the row before");
    CHECK_EQ(int{rows[2 * format.stride() + i]}, 0x5a, "the row behind");
  }
}

// Stochastic rounding by one version. tests/ops/hash_table/test_storage.py looks at its mean.
std::vector<uint16_t> Rounded(const RowFormat& format, const std::vector<float>& numbers, uint32_t version) {
  std::vector<char> row(format.stride());
  format.Store(numbers.data(), version, row.data());
  std::vector<uint16_t> bits(numbers.size());
  std::memcpy(bits.data(), RowFormat::Payload(row.data()), 2 * numbers.size());
  return bits;
}

// A number on the grid stays, so that a row that is stored repeatedly without a change does not drift.
void GridNumbersStay(const Grid& grid) {
  std::vector<float> numbers;
  for (const double value : grid.values()) numbers.push_back(static_cast<float>(value));
  const RowFormat format(grid.storage(), numbers.size(), 0, 0, true);
  for (uint32_t version = 1; version <= 100; ++version) {
    const std::vector<uint16_t> got = Rounded(format, numbers, version);
    for (size_t i = 0; i < numbers.size(); ++i) CHECK_EQ(got[i], i, "version ", version, ", number ", numbers[i]);
  }
}

void NothingBecomesAnotherKindOfNumber() {
  const float infinite = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  for (const uint32_t version : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u}) {
    const RowFormat half(Storage::kFloat16, 6, 0, 0, true), brain(Storage::kBfloat16, 3, 0, 0, true);
    const std::vector<uint16_t> halves =
        Rounded(half, {65504.0f, 65519.0f, 1e9f, -1e9f, -infinite, nan}, version);
    for (const int i : {0, 1, 2}) CHECK_EQ(halves[i], 0x7bff, "float16 stays at its largest finite number");
    for (const int i : {3, 4}) CHECK_EQ(halves[i], 0xfbff);
    CHECK((halves[5] & 0x7fff) > 0x7c00, "not a number stays one");
    const std::vector<uint16_t> brains = Rounded(brain, {infinite, -infinite, nan}, version);
    CHECK_EQ(brains[0], 0x7f80);
    CHECK_EQ(brains[1], 0xff80);
    CHECK((brains[2] & 0x7fff) > 0x7f80, "not a number stays one");
  }
}

}  // namespace
}  // namespace fusedrec

TEST(row_format) {
  using namespace fusedrec;
  const Grid half(Storage::kFloat16), brain(Storage::kBfloat16);
  for (const Grid* grid : {&half, &brain}) {
    EveryPattern(*grid);
    NearestEven(*grid);
    GridNumbersStay(*grid);
  }
  BetweenThe16BitTypes(half, brain);
  BetweenThe16BitTypes(brain, half);
  NothingBecomesAnotherKindOfNumber();
  for (const Storage storage : {Storage::kFloat32, Storage::kBfloat16, Storage::kFloat16}) {
    for (const int dim : {1, 3, 16, 67}) {
      for (const int wide : {0, 1, 2}) {
        for (const int scalars : {0, 1}) LoadGivesBackWhatStoreTook(storage, dim, wide, scalars);
      }
    }
  }
}
