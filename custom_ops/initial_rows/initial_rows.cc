#include "initial_rows/initial_rows.h"

#include <algorithm>
#include <cmath>

namespace fusedrec {
namespace {

// AS 241, PPND16: numerators and denominators, highest power first.
constexpr double kCentralTop[] = {2509.0809287301226727,  33430.575583588128105, 67265.770927008700853,
                                  45921.953931549871457,  13731.693765509461125, 1971.5909503065514427,
                                  133.14166789178437745,  3.387132872796366608};
constexpr double kCentralBottom[] = {5226.495278852854561,   28729.085735721942674, 39307.89580009271061,
                                     21213.794301586595867,  5394.1960214247511077, 687.1870074920579083,
                                     42.313330701600911252,  1.0};
constexpr double kTailTop[] = {7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177,
                               1.27045825245236838258,   3.64784832476320460504,   5.7694972214606914055,
                               4.6303378461565452959,    1.42343711074968357734};
constexpr double kTailBottom[] = {1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966,
                                  0.14810397642748007459,    0.68976733498510000455,  1.6763848301838038494,
                                  2.05319162663775882187,    1.0};

inline double Polynomial(const double (&coefficients)[8], double x) {
  double value = coefficients[0];
  for (int i = 1; i < 8; ++i) value = value * x + coefficients[i];
  return value;
}

constexpr double kBelowMinus2 = 0.022750131948179207;  // probability that a standard normal variable is below -2

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

double NormalQuantile(double p) {
  const double q = p - 0.5;
  if (std::abs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * Polynomial(kCentralTop, r) / Polynomial(kCentralBottom, r);
  }
  // Good to r = 5, p = 1.4e-11; AS 241 has a third pair of polynomials for what no 32-bit number reaches.
  const double r = std::sqrt(-std::log(q < 0 ? p : 1.0 - p)) - 1.6;
  const double x = Polynomial(kTailTop, r) / Polynomial(kTailBottom, r);
  return q < 0 ? -x : x;
}

Distribution DistributionOf(const std::string& name) {
  return name == "constant"  ? Distribution::kConstant
         : name == "uniform" ? Distribution::kUniform
         : name == "normal"  ? Distribution::kNormal
                             : Distribution::kTruncatedNormal;
}

void InitialRow(Distribution distribution, double a, double b, uint64_t seed, int64_t id, absl::Span<float> row) {
  if (distribution == Distribution::kConstant) {
    std::fill(row.begin(), row.end(), static_cast<float>(a));
    return;
  }
  const uint32_t id_low = static_cast<uint32_t>(id), id_high = static_cast<uint32_t>(static_cast<uint64_t>(id) >> 32);
  std::array<uint32_t, 4> bits{};
  for (size_t d = 0; d < row.size(); ++d) {
    if (d % 4 == 0) bits = Philox4x32({id_low, id_high, static_cast<uint32_t>(d / 4), 0}, seed);
    const double p = (bits[d % 4] + 0.5) * 0x1p-32;  // in (0, 1)
    double value;
    switch (distribution) {
      case Distribution::kUniform:
        value = a + (b - a) * p;
        break;
      case Distribution::kNormal:
        value = a + b * NormalQuantile(p);
        break;
      default:
        value = a + b * NormalQuantile(kBelowMinus2 + (1.0 - 2.0 * kBelowMinus2) * p);
    }
    row[d] = static_cast<float>(value);
  }
}

}  // namespace fusedrec
