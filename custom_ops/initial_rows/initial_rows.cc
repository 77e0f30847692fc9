#include "initial_rows/initial_rows.h"

#include <algorithm>
#include <cmath>

namespace fusedrec {
namespace {

// A number in (0, 1): never 0, so that its logarithm is finite.
inline double UnitOpen(uint32_t bits) { return (bits + 0.5) * 0x1p-32; }

struct Pair {
  double first, second;
};

// Two independent standard normal numbers from two uniform ones.
inline Pair BoxMuller(uint32_t a, uint32_t b) {
  const double radius = std::sqrt(-2.0 * std::log(UnitOpen(a)));
  const double angle = 2.0 * M_PI * UnitOpen(b);
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

}  // namespace

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, uint64_t key) {
  uint32_t key_low = static_cast<uint32_t>(key), key_high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key_low, static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key_high, static_cast<uint32_t>(product0)};
    key_low += 0x9E3779B9;
    key_high += 0xBB67AE85;
  }
  return counter;
}

void InitialRow(Distribution distribution, double a, double b, uint64_t seed, int64_t id, absl::Span<float> row) {
  const uint32_t id_low = static_cast<uint32_t>(id), id_high = static_cast<uint32_t>(static_cast<uint64_t>(id) >> 32);
  const size_t dim = row.size();
  switch (distribution) {
    case Distribution::kConstant:
      std::fill(row.begin(), row.end(), static_cast<float>(a));
      return;
    case Distribution::kUniform:
      for (size_t d = 0; d < dim; d += 4) {
        const auto bits = Philox4x32({id_low, id_high, static_cast<uint32_t>(d / 4), 0}, seed);
        for (size_t j = 0; j < 4 && d + j < dim; ++j) {
          row[d + j] = static_cast<float>(a + (b - a) * (bits[j] * 0x1p-32));
        }
      }
      return;
    case Distribution::kNormal:
      for (size_t d = 0; d < dim; d += 4) {
        const auto bits = Philox4x32({id_low, id_high, static_cast<uint32_t>(d / 4), 0}, seed);
        const Pair low = BoxMuller(bits[0], bits[1]), high = BoxMuller(bits[2], bits[3]);
        const double normal[4] = {low.first, low.second, high.first, high.second};
        for (size_t j = 0; j < 4 && d + j < dim; ++j) row[d + j] = static_cast<float>(a + b * normal[j]);
      }
      return;
    case Distribution::kTruncatedNormal:
      for (size_t d = 0; d < dim; ++d) {
        double normal;
        uint32_t attempt = 0;
        do {
          const auto bits = Philox4x32({id_low, id_high, static_cast<uint32_t>(d), attempt++}, seed);
          normal = BoxMuller(bits[0], bits[1]).first;
        } while (std::abs(normal) > 2.0);
        row[d] = static_cast<float>(a + b * normal);
      }
      return;
  }
}

}  // namespace fusedrec
