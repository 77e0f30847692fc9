// The tile engine for any machine: vectors of 4 floats, no fused products. Division instead of an estimate.
#include "jagged_attention/tile_engine.h"

namespace fusedrec {
namespace tiles_generic {

constexpr int kVectorBytes = 16;
constexpr int kBlockRows = 4;

typedef float Vec __attribute__((vector_size(kVectorBytes)));

static inline Vec Fma(Vec a, Vec b, Vec c) { return a * b + c; }
static inline Vec Max(Vec a, Vec b) { return a > b ? a : b; }
static inline Vec Min(Vec a, Vec b) { return a < b ? a : b; }
static inline Vec Reciprocal(Vec x) { return 1.0f / x; }

#include "jagged_attention/engine.inc.h"

}  // namespace tiles_generic

const TileEngine kGenericEngine = {"generic", [] { return true; }, FUSEDREC_TILE_FUNCTIONS(tiles_generic)};

}  // namespace fusedrec
