// The tile engine for AVX-512: 32 registers of 16 floats.
#include "jagged_attention/cpu/tile_engine.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
// GCC 12 takes the operands that its own intrinsics leave undefined on purpose for mistakes (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")

namespace fusedrec {
namespace tiles_avx512 {

constexpr int kVectorBytes = 64;
constexpr int kBlockRows = 6;
constexpr int kBlockVectors = 4;

typedef float Vec __attribute__((vector_size(kVectorBytes)));

static inline Vec Fma(Vec a, Vec b, Vec c) { return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
static inline Vec Max(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
static inline Vec Min(Vec a, Vec b) { return (Vec)_mm512_min_ps((__m512)a, (__m512)b); }
// 14 bits from the table of the processor, doubled by one step of Newton.
static inline Vec Reciprocal(Vec x) {
  const __m512 near = _mm512_rcp14_ps((__m512)x);
  return (Vec)_mm512_mul_ps(near, _mm512_fnmadd_ps((__m512)x, near, _mm512_set1_ps(2.0f)));
}

static inline Vec JoinQuads(const float* const* rows, int64_t c) {
  const auto pair = [&](int r) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[r] + c)), _mm_loadu_ps(rows[r + 4] + c), 1);
  };
  return (Vec)_mm512_insertf32x8(_mm512_castps256_ps512(pair(0)), pair(8), 1);
}

static inline void SplitQuads(Vec x, float* to, int64_t stride) {
  _mm_storeu_ps(to, _mm512_castps512_ps128((__m512)x));
  _mm_storeu_ps(to + stride, _mm512_extractf32x4_ps((__m512)x, 1));
  _mm_storeu_ps(to + 2 * stride, _mm512_extractf32x4_ps((__m512)x, 2));
  _mm_storeu_ps(to + 3 * stride, _mm512_extractf32x4_ps((__m512)x, 3));
}

#include "jagged_attention/cpu/engine.inc.h"

}  // namespace tiles_avx512

static bool Supported() { return __builtin_cpu_supports("x86-64-v4"); }

const TileEngine kAvx512Engine = {"avx512", Supported, FUSEDREC_TILE_FUNCTIONS(tiles_avx512)};

}  // namespace fusedrec

#pragma GCC pop_options
#endif
