// Numbers of tensors on a GPU: float, and the two 16-bit types as bits, computed with in float.
//
// By instructions and not by cuda_fp16.h: the emulation and a compiler without headers need nothing else.
#pragma once

#include "common/device.cuh"

namespace fusedrec {

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

__device__ inline float ToFloat(float x) { return x; }
__device__ inline float ToFloat(Bfloat16 x) { return __int_as_float(static_cast<int>(static_cast<uint32_t>(x.bits) << 16)); }

#ifdef FUSEDREC_EMULATION
inline float ToFloat(Half x) {
  _Float16 half;
  std::memcpy(&half, &x.bits, 2);
  return static_cast<float>(half);
}
template <typename T>
T FromFloat(float x);
template <>
inline float FromFloat<float>(float x) {
  return x;
}
template <>
inline Half FromFloat<Half>(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  Half out;
  std::memcpy(&out.bits, &half, 2);
  return out;
}
template <>
inline Bfloat16 FromFloat<Bfloat16>(float x) {
  if (x != x) return {0x7fff};
  const uint32_t bits = static_cast<uint32_t>(__float_as_int(x));
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};  // to the nearest, ties to even
}
#else
__device__ inline float ToFloat(Half x) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
  return out;
}
template <typename T>
__device__ T FromFloat(float x);
template <>
__device__ inline float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ inline Half FromFloat<Half>(float x) {
  Half out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
  return out;
}
template <>
__device__ inline Bfloat16 FromFloat<Bfloat16>(float x) {
  uint32_t pair;  // scalar conversions need sm_90; the other half is not used
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(x));
  return {static_cast<uint16_t>(pair)};
}
#endif

// How launchers name the type of tensors.
enum NumberType { kNumberFloat = 0, kNumberHalf = 1, kNumberBfloat16 = 2 };

}  // namespace fusedrec
