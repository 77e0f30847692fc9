// The tensor core instructions, by what the PTX manual says of who holds what: g = lane / 4, t = lane % 4.
#pragma once

#include "emulation/meetings.h"

namespace fusedrec {
namespace attention {

// Matrix m of 8 x 8 numbers of 16 bits: its rows are at the addresses of lanes 8 m to 8 m + 7.
inline void LoadMatrices(int count, bool transposed, const void* row, uint32_t* registers) {
  struct Operand {
    const void* row;
    uint32_t* registers;
  } operand{row, registers};
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) emulation::Die("ldmatrix needs rows at multiples of 16 bytes");
  emulation::Collective(0xffffffffu, "ldmatrix", &operand, [=](void** lanes) {
    const auto at = [&](int m, int i, int j) {
      return static_cast<const uint16_t*>(static_cast<Operand*>(lanes[8 * m + i])->row)[j];
    };
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane >> 2, t = lane & 3;
      for (int m = 0; m < count; ++m) {
        const uint32_t low = transposed ? at(m, 2 * t, g) : at(m, g, 2 * t);
        const uint32_t high = transposed ? at(m, 2 * t + 1, g) : at(m, g, 2 * t + 1);
        static_cast<Operand*>(lanes[lane])->registers[m] = low | high << 16;
      }
    }
  });
}
inline void LoadMatrices4(const void* row, uint32_t* r) { LoadMatrices(4, false, row, r); }
inline void LoadMatrices2(const void* row, uint32_t* r) { LoadMatrices(2, false, row, r); }
inline void LoadTransposed2(const void* row, uint32_t* r) { LoadMatrices(2, true, row, r); }

// c[16, 8] += a[16, depth] b[depth, 8]; number(register, half) reads an operand. `halves` numbers to a register.
template <typename Number>
void MultiplyMatrices(const char* operation, int halves, const uint32_t* a, const uint32_t* b, float* c,
                      const Number& number) {
  struct Operand {
    const uint32_t *a, *b;
    float* c;
  } operand{a, b, c};
  emulation::Collective(0xffffffffu, operation, &operand, [=](void** lanes) {
    float left[16][16], right[16][8];
    const int half_depth = 4 * halves;
    for (int lane = 0; lane < 32; ++lane) {
      const auto* own = static_cast<Operand*>(lanes[lane]);
      const int g = lane >> 2, t = lane & 3;
      for (int h = 0; h < halves; ++h) {
        for (int r = 0; r < 4; ++r) left[g + (r & 1) * 8][halves * t + h + (r >> 1) * half_depth] = number(own->a[r], h);
        for (int r = 0; r < 2; ++r) right[halves * t + h + r * half_depth][g] = number(own->b[r], h);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      auto* own = static_cast<Operand*>(lanes[lane]);
      for (int r = 0; r < 4; ++r) {
        const int i = (lane >> 2) + (r >> 1) * 8, j = 2 * (lane & 3) + (r & 1);
        float sum = 0.0f;
        for (int k = 0; k < 2 * half_depth; ++k) sum += left[i][k] * right[k][j];
        own->c[r] += sum;
      }
    }
  });
}
template <typename T>
void Multiply(T, const uint32_t* a, const uint32_t* b, float* c) {
  MultiplyMatrices("mma.m16n8k16", 2, a, b, c,
                   [](uint32_t pair, int h) { return ToFloat(T{static_cast<uint16_t>(pair >> (16 * h))}); });
}
inline void MultiplyTf32(const uint32_t* a, const uint32_t* b, float* c) {
  MultiplyMatrices("mma.m16n8k8", 1, a, b, c, [](uint32_t bits, int) {
    if ((bits & 0x1fff) != 0) emulation::Die("an operand of tf32 has more than ten bits");
    return __int_as_float(static_cast<int>(bits));
  });
}
// Rounds to ten bits, ties away from zero.
inline uint32_t ToTf32(float x) { return (static_cast<uint32_t>(__float_as_int(x)) + 0x1000u) & ~0x1fffu; }

}  // namespace attention
}  // namespace fusedrec
