// The tile engine for any machine: vectors of 4 floats, no fused products. Division instead of an estimate.
#include "jagged_attention/cpu/tile_engine.h"

namespace fusedrec {
namespace tiles_generic {

constexpr int kVectorBytes = 16;
constexpr int kBlockRows = 4;
constexpr int kBlockVectors = 2;

typedef float Vec __attribute__((vector_size(kVectorBytes)));

static inline Vec Fma(Vec a, Vec b, Vec c) { return a * b + c; }
static inline Vec Max(Vec a, Vec b) { return a > b ? a : b; }
static inline Vec Min(Vec a, Vec b) { return a < b ? a : b; }
static inline Vec Reciprocal(Vec x) { return 1.0f / x; }

static inline Vec JoinQuads(const float* const* rows, int64_t c) {
  typedef float LooseVec __attribute__((vector_size(16), aligned(4), may_alias));
  return *reinterpret_cast<const LooseVec*>(rows[0] + c);
}

static inline void SplitQuads(Vec x, float* to, int64_t) { __builtin_memcpy(to, &x, sizeof(x)); }

#include "jagged_attention/cpu/engine.inc.h"

}  // namespace tiles_generic

const TileEngine kGenericEngine = {"generic", [] { return true; }, FUSEDREC_TILE_FUNCTIONS(tiles_generic)};

}  // namespace fusedrec
