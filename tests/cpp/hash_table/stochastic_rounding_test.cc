// Stochastic rounding: to one of the two neighbours on the 16-bit grid, up with the probability that is the distance
// from the lower one, so that the mean over many versions of the table is the number itself.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "grids.h"
#include "hash_table/cpu/rows/row_format.h"

namespace fusedrec {
namespace {

constexpr int kVersions = 4096;

std::vector<uint16_t> Rounded(const RowFormat& format, const std::vector<float>& numbers, uint32_t version) {
  std::vector<char> row(format.stride());
  format.Store(numbers.data(), version, row.data());
  std::vector<uint16_t> bits(numbers.size());
  std::memcpy(bits.data(), RowFormat::Payload(row.data()), 2 * numbers.size());
  return bits;
}

// Numbers of every size that the type has, subnormal ones included, and some that are on the grid already.
std::vector<float> Numbers(const Grid& grid) {
  std::mt19937 random(5);
  std::vector<float> numbers = {0.0f, -0.0f, 1.0f, 1.0f + 1.0f / 4096, -1.5f};
  const std::vector<double>& values = grid.values();
  for (int i = 0; i < 250; ++i) {
    const size_t place = random() % (values.size() - 1);
    const double part = (random() % 1024) / 1024.0, sign = random() % 2 ? 1.0 : -1.0;
    const float number = static_cast<float>(sign * (values[place] + part * (values[place + 1] - values[place])));
    if (number == 0.0f || std::isnormal(number)) numbers.push_back(number);  // the next test has the others
  }
  return numbers;
}

void UnbiasedWithinOneStep(const Grid& grid) {
  const std::vector<float> numbers = Numbers(grid);
  const RowFormat format(grid.storage(), numbers.size(), 0, 0, true);
  std::vector<int> ups(numbers.size());
  for (uint32_t version = 1; version <= kVersions; ++version) {
    const std::vector<uint16_t> got = Rounded(format, numbers, version);
    for (size_t i = 0; i < numbers.size(); ++i) {
      const uint16_t below = grid.Below(numbers[i]), magnitude = got[i] & 0x7fff;
      CHECK_EQ((got[i] & 0x8000) != 0, std::signbit(numbers[i]), "of ", numbers[i]);
      CHECK(magnitude == below || magnitude == below + 1, "of ", numbers[i], " got pattern ", magnitude);
      ups[i] += magnitude != below;
    }
  }
  for (size_t i = 0; i < numbers.size(); ++i) {
    const std::vector<double>& values = grid.values();
    const uint16_t below = grid.Below(numbers[i]);
    const double step = values[below + 1] - values[below];
    const double probability = (std::abs(static_cast<double>(numbers[i])) - values[below]) / step;
    // Five standard errors of a share of kVersions trials; where the share is 0 there is nothing random.
    const double allowed = 5 * std::sqrt(probability * (1 - probability) / kVersions);
    CHECK(std::abs(ups[i] / double{kVersions} - probability) <= allowed, "of ", numbers[i], ": went up ", ups[i],
          " times of ", kVersions, ", probability ", probability);
  }
}

// Columns that hold the same number are rounded apart: their mean is right in a single version too.
void ColumnsAreIndependent(const Grid& grid) {
  constexpr int kDim = 8192;
  const RowFormat format(grid.storage(), kDim, 0, 0, true);
  const float number = 1.0f + 0.25f / (grid.storage() == Storage::kFloat16 ? 1024 : 128);  // a quarter of a step
  const std::vector<uint16_t> one = Rounded(format, std::vector<float>(kDim, number), 1);
  const std::vector<uint16_t> two = Rounded(format, std::vector<float>(kDim, number), 2);
  int ups = 0, both = 0;
  for (int d = 0; d < kDim; ++d) {
    ups += one[d] % 2;
    both += one[d] % 2 && two[d] % 2;
  }
  // Five standard errors: sqrt(p (1 - p) / n) is 0.0048 for 1/4 and 0.0027 for 1/16.
  CHECK(std::abs(ups / double{kDim} - 0.25) < 0.024, "went up in ", ups, " of ", kDim, " columns");
  CHECK(std::abs(both / double{kDim} - 0.0625) < 0.0135, "went up twice in ", both, " of ", kDim, " columns");
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

TEST(stochastic_rounding) {
  using namespace fusedrec;
  for (const Storage storage : {Storage::kFloat16, Storage::kBfloat16}) {
    const Grid grid(storage);
    UnbiasedWithinOneStep(grid);
    ColumnsAreIndependent(grid);
    GridNumbersStay(grid);
  }
  NothingBecomesAnotherKindOfNumber();
}
