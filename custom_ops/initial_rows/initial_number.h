// One number of an initial row, on the CPU and on a GPU, bit for bit. initial_rows.h defines it. No library is used.
//
// Only operations that IEEE 754 rounds in one way (+ - * / and the square root) take part, so that no two machines
// differ; the logarithm is our own for that reason.
#pragma once

#include <cmath>
#include <cstring>

#include "common/host_device.h"

namespace fusedrec {

enum class Distribution {
  kConstant,         // a everywhere
  kUniform,          // [a, b)
  kNormal,           // mean a, standard deviation b
  kTruncatedNormal,  // the same, given that it lies inside a +- 2 b
};

struct Four {
  uint32_t number[4];
};

FUSEDREC_HOST_DEVICE inline Four Philox4x32(Four counter, uint64_t key) {
  uint32_t key_low = static_cast<uint32_t>(key), key_high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter.number[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter.number[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.number[1] ^ key_low, static_cast<uint32_t>(product1),
        static_cast<uint32_t>(product0 >> 32) ^ counter.number[3] ^ key_high, static_cast<uint32_t>(product0)}};
    key_low += 0x9E3779B9;
    key_high += 0xBB67AE85;
  }
  return counter;
}

// The four numbers of columns [4 block, 4 block + 4).
FUSEDREC_HOST_DEVICE inline Four InitialBits(uint64_t seed, int64_t id, uint32_t block) {
  const uint64_t bits = static_cast<uint64_t>(id);
  return Philox4x32({{static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32), block, 0}}, seed);
}

// Natural logarithm of a normal number > 0; relative error some 1e-16. log(2^e m) = e log 2 + 2 artanh((m - 1) / (m + 1)),
// m in [sqrt(1/2), sqrt(2)), by the series of artanh, whose terms beyond the last one are below 1e-17 of it.
FUSEDREC_HOST_DEVICE inline double NaturalLog(double x) {
#if defined(__CUDA_ARCH__)
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(x));
#else
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
#endif
  const uint64_t rest = bits & 0xfffffffffffffULL, one = uint64_t{1023} << 52;
  const bool upper = rest >= 0x6a09e667f3bcdULL;  // of sqrt(2)
  const uint64_t reduced = rest | (upper ? one - (uint64_t{1} << 52) : one);
  const double exponent = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023 + (upper ? 1 : 0));
#if defined(__CUDA_ARCH__)
  const double m = __longlong_as_double(static_cast<long long>(reduced));
#else
  double m;
  std::memcpy(&m, &reduced, 8);
#endif
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double series = 0.0;
  for (int k = 23; k >= 3; k -= 2) series = (series + 1.0 / k) * z;
  // log 2 in two parts: the product with the first, of 32 bits, is exact.
  constexpr double kLog2High = 6.93147180369123816490e-01, kLog2Low = 1.90821492927058770002e-10;
  return exponent * kLog2High + (2.0 * s + (2.0 * s * series + exponent * kLog2Low));
}

FUSEDREC_HOST_DEVICE inline double Polynomial(const double (&coefficients)[8], double x) {
  double value = coefficients[0];
  for (int i = 1; i < 8; ++i) value = value * x + coefficients[i];
  return value;
}

// The number below which a standard normal variable falls with probability p, 1e-11 < p < 1 - 1e-11: AS 241, PPND16.
// Coefficients of the highest power first.
FUSEDREC_HOST_DEVICE inline double NormalQuantile(double p) {
  const double central_top[] = {2509.0809287301226727, 33430.575583588128105, 67265.770927008700853,
      45921.953931549871457, 13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608};
  const double central_bottom[] = {5226.495278852854561, 28729.085735721942674, 39307.89580009271061,
      21213.794301586595867, 5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0};
  const double tail_top[] = {7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177,
                             1.27045825245236838258,   3.64784832476320460504,   5.7694972214606914055,
                             4.6303378461565452959,    1.42343711074968357734};
  const double tail_bottom[] = {1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966,
      0.14810397642748007459, 0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0};
  const double q = p - 0.5;
  if (q <= 0.425 && q >= -0.425) {
    const double r = 0.180625 - q * q;
    return q * Polynomial(central_top, r) / Polynomial(central_bottom, r);
  }
  // Good to r = 5, p = 1.4e-11; AS 241 has a third pair of polynomials, for arguments that no 32-bit number reaches.
  const double r = ::sqrt(-NaturalLog(q < 0 ? p : 1.0 - p)) - 1.6;
  const double x = Polynomial(tail_top, r) / Polynomial(tail_bottom, r);
  return q < 0 ? -x : x;
}

// The number of a column whose random bits are `bits`.
FUSEDREC_HOST_DEVICE inline float InitialNumber(Distribution distribution, double a, double b, uint32_t bits) {
  constexpr double kBelowMinus2 = 0.022750131948179207;  // probability that a standard normal variable is below -2
  const double p = (bits + 0.5) * 2.3283064365386963e-10;  // 2^-32; in (0, 1)
  switch (distribution) {
    case Distribution::kConstant:
      return static_cast<float>(a);
    case Distribution::kUniform:
      return static_cast<float>(a + (b - a) * p);
    case Distribution::kNormal:
      return static_cast<float>(a + b * NormalQuantile(p));
    default:
      return static_cast<float>(a + b * NormalQuantile(kBelowMinus2 + (1.0 - 2.0 * kBelowMinus2) * p));
  }
}

}  // namespace fusedrec
