// How numbers of a row are stored, on the CPU and on a GPU, bit for bit; row_format.h says where they lie.
#pragma once

#include <cstring>

#include "common/host_device.h"

namespace fusedrec {

enum class Storage { kFloat32, kBfloat16, kFloat16, kInt8 };

FUSEDREC_HOST_DEVICE inline int BytesOf(Storage storage) {
  return storage == Storage::kFloat32 ? 4 : storage == Storage::kInt8 ? 1 : 2;
}

FUSEDREC_HOST_DEVICE inline uint32_t BitsOf(float x) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__float_as_int(x));
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
#endif
}

// Infinities and NaNs have an exponent of ones.
FUSEDREC_HOST_DEVICE inline bool IsFinite(float x) {
  constexpr uint32_t kExponent = 0x7f800000;
  return (BitsOf(x) & kExponent) != kExponent;
}

FUSEDREC_HOST_DEVICE inline float FloatOf(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __int_as_float(static_cast<int>(bits));
#else
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}

// `yes` or `no`, both computed. The compiler turns `?:` into a branch here, and the loop does not vectorize.
FUSEDREC_HOST_DEVICE inline uint32_t Either(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = -static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

FUSEDREC_HOST_DEVICE inline float FromBfloat16(uint16_t bits) { return FloatOf(uint32_t{bits} << 16); }

// Adds `below`, less than one step of the 16-bit grid, and truncates. A NaN stays a NaN.
FUSEDREC_HOST_DEVICE inline uint16_t ToBfloat16(float x, uint32_t below) {
  const uint32_t bits = BitsOf(x);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000, infinite = (bits & 0x7fffffff) == 0x7f800000;
  const uint32_t rounded = (bits + below) >> 16;
  return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : infinite ? bits >> 16 : rounded);
}

FUSEDREC_HOST_DEVICE inline uint32_t NearestBelow(uint32_t bits, int dropped) {
  return ((1u << (dropped - 1)) - 1) + ((bits >> dropped) & 1);
}

// No subnormal float32 on the way: TensorFlow's threads flush those to zero.
FUSEDREC_HOST_DEVICE inline float FromFloat16(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16, rest = half & 0x7fff;
  const uint32_t normal = (rest << 13) + (112u << 23), special = 0x7f800000 | (rest & 0x3ff) << 13;
  const uint32_t subnormal = BitsOf(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f);
  return FloatOf(sign | Either(rest < 0x400, subnormal, rest >= 0x7c00 ? special : normal));
}

// `random` are 32 uniform bits, or null for the nearest. Beyond the largest finite number float16 saturates: an infinite
// row could never come back.
FUSEDREC_HOST_DEVICE inline uint16_t ToFloat16(float x, bool stochastic, uint32_t random) {
  const uint32_t bits = BitsOf(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  // Below 2^-14 float16 is subnormal: its grid is 2^-24 there. To the nearest, it is reached by adding 0.5 = 2^-1, whose
  // own grid is 2^-24; stochastically, by comparing the exact remainder with a random number below 1.
  constexpr uint32_t kSmallestNormal = 113u << 23;  // 2^-14, as the bits of a float
  const float small = FloatOf(magnitude < kSmallestNormal ? magnitude : kSmallestNormal);
  uint32_t subnormal;
  if (stochastic) {
    const float steps = small * 0x1p24f;
    const int32_t whole = static_cast<int32_t>(steps);
    const float uniform = static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1p-24f;
    const float cut = steps - static_cast<float>(whole);
    subnormal = static_cast<uint32_t>(whole) + (BitsOf(uniform - cut) >> 31);  // one more where uniform < cut
  } else {
    subnormal = BitsOf(small + 0.5f) - BitsOf(0.5f);  // rounds to even
  }
  const uint32_t below = stochastic ? random >> 19 : NearestBelow(magnitude, 13);
  const uint32_t normal = ((magnitude + below) >> 13) - (112u << 10);
  const uint32_t finite = Either(magnitude < kSmallestNormal, subnormal, normal < 0x7bffu ? normal : 0x7bffu);
  const bool nan = magnitude > 0x7f800000;
  return static_cast<uint16_t>(sign | Either(nan, 0x7e00, finite));
}

FUSEDREC_HOST_DEVICE inline uint32_t RandomBits(uint32_t bits, uint32_t column, uint32_t version) {
  uint32_t x = bits ^ (column * 0x9e3779b9u) ^ (version * 0x85ebca6bu);  // 32-bit finalizer of MurmurHash3
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  return x ^ (x >> 16);
}

FUSEDREC_HOST_DEVICE inline float LoadNumber(Storage storage, const void* numbers, int64_t i) {
  if (storage == Storage::kFloat32) return static_cast<const float*>(numbers)[i];
  const uint16_t bits = static_cast<const uint16_t*>(numbers)[i];
  return storage == Storage::kBfloat16 ? FromBfloat16(bits) : FromFloat16(bits);
}

// To the nearest, ties to even; stochastically by the number's column and the version (row_format.h).
FUSEDREC_HOST_DEVICE inline void StoreNumber(Storage storage, float x, void* numbers, int64_t i, bool stochastic = false,
                                             uint32_t column = 0, uint32_t version = 0) {
  if (storage == Storage::kFloat32) {
    static_cast<float*>(numbers)[i] = x;
    return;
  }
  const uint32_t random = stochastic ? RandomBits(BitsOf(x), column, version) : 0;
  uint16_t* const to = static_cast<uint16_t*>(numbers) + i;
  if (storage == Storage::kBfloat16) {
    *to = ToBfloat16(x, stochastic ? random >> 16 : NearestBelow(BitsOf(x), 16));
  } else {
    *to = ToFloat16(x, stochastic, random);
  }
}

}  // namespace fusedrec
