// The tile engine for AVX2 with fused products: 16 registers of 8 floats.
#include "jagged_attention/cpu/tile_engine.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")

namespace fusedrec {
namespace tiles_avx2 {

constexpr int kVectorBytes = 32;
constexpr int kBlockRows = 6;
constexpr int kBlockVectors = 2;

typedef float Vec __attribute__((vector_size(kVectorBytes)));

static inline Vec Fma(Vec a, Vec b, Vec c) { return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
static inline Vec Max(Vec a, Vec b) { return (Vec)_mm256_max_ps((__m256)a, (__m256)b); }
static inline Vec Min(Vec a, Vec b) { return (Vec)_mm256_min_ps((__m256)a, (__m256)b); }
static inline Vec Reciprocal(Vec x) { return 1.0f / x; }

static inline Vec JoinQuads(const float* const* rows, int64_t c) {
  return (Vec)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[0] + c)), _mm_loadu_ps(rows[4] + c), 1);
}

static inline void SplitQuads(Vec x, float* to, int64_t stride) {
  _mm_storeu_ps(to, _mm256_castps256_ps128((__m256)x));
  _mm_storeu_ps(to + stride, _mm256_extractf128_ps((__m256)x, 1));
}

#include "jagged_attention/cpu/engine.inc.h"

}  // namespace tiles_avx2

static bool Supported() { return __builtin_cpu_supports("x86-64-v3"); }

const TileEngine kAvx2Engine = {"avx2", Supported, FUSEDREC_TILE_FUNCTIONS(tiles_avx2)};

}  // namespace fusedrec

#pragma GCC pop_options
#endif
