// Products of tiles in shared memory by the tensor cores: fragments of a warp, 16 rows at a time.
//
// Engine<T> knows the instruction of a type. Fragments are laid out as the PTX manual says (mma.m16n8k16 for 16-bit
// types, mma.m16n8k8 for tf32): with g = lane / 4 and t = lane % 4, a thread holds of the result rows g and g + 8,
// columns 2t and 2t + 1.
//
// float: a number is the sum of two tf32 numbers but for 2^-22 of it; the product of the small parts is left out ("3xTF32").
#pragma once

#include "common/number.cuh"
#ifdef FUSEDREC_EMULATION
#include "emulation/tensor_core.h"
#endif

namespace fusedrec::attention {

#ifndef FUSEDREC_EMULATION
__device__ inline uint32_t SharedAddress(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ inline void LoadMatrices4(const void* row, uint32_t* r) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(SharedAddress(row)) : "memory");
}
__device__ inline void LoadMatrices2(const void* row, uint32_t* r) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(SharedAddress(row)) : "memory");
}
__device__ inline void LoadTransposed2(const void* row, uint32_t* r) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(SharedAddress(row)) : "memory");
}
#define FUSEDREC_MMA_16(name)                                                                               \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, " \
               "{%8,%9}, {%0,%1,%2,%3};"                                                                    \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
__device__ inline void Multiply(Half, const uint32_t* a, const uint32_t* b, float* c) { FUSEDREC_MMA_16("f16"); }
__device__ inline void Multiply(Bfloat16, const uint32_t* a, const uint32_t* b, float* c) { FUSEDREC_MMA_16("bf16"); }
#undef FUSEDREC_MMA_16
__device__ inline void MultiplyTf32(const uint32_t* a, const uint32_t* b, float* c) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline uint32_t ToTf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}
#endif

template <typename T>
struct Engine {  // Half and Bfloat16
  static constexpr int kDepth = 16;  // of one instruction
  static constexpr int kPad = 8;     // numbers behind a row of a tile: the rows of a load fall into different banks
  struct A {
    uint32_t r[4];
  };
  struct B {
    uint32_t r[2];
  };

  static __device__ void Load(const T* tile, int stride, A* a) {
    LoadMatrices4(tile + (Lane() & 15) * stride + (Lane() >> 4) * 8, a->r);
  }
  // B[k][n] = tile[n][k]: eight rows.
  static __device__ void LoadRows(const T* tile, int stride, B* b) {
    LoadMatrices2(tile + (Lane() & 7) * stride + (Lane() >> 3 & 1) * 8, b->r);
  }
  // B[k][n] = tile[k][n]: sixteen rows.
  static __device__ void LoadColumns(const T* tile, int stride, B* b) {
    LoadTransposed2(tile + (Lane() & 15) * stride, b->r);
  }
  static __device__ void MultiplyAdd(const A& a, const B& b, float* c) { Multiply(T{}, a.r, b.r, c); }
};

template <>
struct Engine<float> {
  static constexpr int kDepth = 8;
  static constexpr int kPad = 4;
  struct A {
    uint32_t large[4], small[4];
  };
  struct B {
    uint32_t large[2], small[2];
  };

  static __device__ void Split(float x, uint32_t* large, uint32_t* small) {
    *large = ToTf32(x);
    *small = ToTf32(x - __int_as_float(static_cast<int>(*large)));
  }
  static __device__ void Load(const float* tile, int stride, A* a) {
    const int g = Lane() >> 2, t = Lane() & 3;
#pragma unroll
    for (int r = 0; r < 4; ++r) Split(tile[(g + (r & 1) * 8) * stride + t + (r >> 1) * 4], &a->large[r], &a->small[r]);
  }
  static __device__ void LoadRows(const float* tile, int stride, B* b) {
    const int g = Lane() >> 2, t = Lane() & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) Split(tile[g * stride + t + r * 4], &b->large[r], &b->small[r]);
  }
  static __device__ void LoadColumns(const float* tile, int stride, B* b) {
    const int g = Lane() >> 2, t = Lane() & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) Split(tile[(t + r * 4) * stride + g], &b->large[r], &b->small[r]);
  }
  static __device__ void MultiplyAdd(const A& a, const B& b, float* c) {
    MultiplyTf32(a.small, b.large, c);
    MultiplyTf32(a.large, b.small, c);
    MultiplyTf32(a.large, b.large, c);
  }
};

// sums[n] += the 16 rows at `a` times eight columns of B each; B as LoadColumns (kColumns) or LoadRows has it.
template <typename T, int kDepth, int kBlocks, bool kColumns>
__device__ inline void MultiplyTile(const T* a, int a_stride, const T* b, int b_stride, float (*sums)[4]) {
  using E = Engine<T>;
#pragma unroll
  for (int k = 0; k < kDepth; k += E::kDepth) {
    typename E::A left;
    E::Load(a + k, a_stride, &left);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      typename E::B right;
      if (kColumns) {
        E::LoadColumns(b + k * b_stride + n * 8, b_stride, &right);
      } else {
        E::LoadRows(b + n * 8 * b_stride + k, b_stride, &right);
      }
      E::MultiplyAdd(left, right, sums[n]);
    }
  }
}

}  // namespace fusedrec::attention
