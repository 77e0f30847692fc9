// 16-bit numbers: every pattern widens to its value and narrows back to itself; every float32 goes to its nearest
// neighbour, ties to even. The oracle is the definition of the types, in double (grids.h).
#include "hash_table/cpu/rows/row_format.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "grids.h"

namespace fusedrec {
namespace {

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
  CHECK_EQ(format.stride() % 8, 0);
  CHECK(format.stride() >= 16 + format.payload_bytes());
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

}  // namespace
}  // namespace fusedrec

TEST(row_format) {
  using namespace fusedrec;
  const Grid half(Storage::kFloat16), brain(Storage::kBfloat16);
  for (const Grid* grid : {&half, &brain}) {
    EveryPattern(*grid);
    NearestEven(*grid);
  }
  BetweenThe16BitTypes(half, brain);
  BetweenThe16BitTypes(brain, half);
  for (const Storage storage : {Storage::kFloat32, Storage::kBfloat16, Storage::kFloat16}) {
    for (const int dim : {1, 3, 16, 67}) {
      for (const int wide : {0, 1, 2}) {
        for (const int scalars : {0, 1}) LoadGivesBackWhatStoreTook(storage, dim, wide, scalars);
      }
    }
  }
}
