// The tile engine, included by engine_<instruction set>.cc inside a namespace that has defined
//   kVectorBytes, kBlockRows, kBlockVectors, Vec, Fma, Max, Min, Reciprocal,
//   JoinQuads   joins 4 numbers from column c of every fourth row
//   SplitQuads  writes the quarters (16 bytes) of a vector to rows of `stride` numbers
// No include guard and no includes: see tile_engine.h for why.

constexpr int64_t kLanes = kVectorBytes / 4;

typedef int32_t IntVec __attribute__((vector_size(kVectorBytes)));
typedef uint32_t UintVec __attribute__((vector_size(kVectorBytes)));
typedef float LooseVec __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef int32_t LooseIntVec __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));

static inline Vec Load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
static inline void Store(float* p, Vec x) { *reinterpret_cast<LooseVec*>(p) = x; }
static inline void StoreInt(int32_t* p, IntVec x) { *reinterpret_cast<LooseIntVec*>(p) = x; }
static inline IntVec LoadInt(const int32_t* p) { return *reinterpret_cast<const LooseIntVec*>(p); }
static inline Vec Splat(float x) { return x - Vec{}; }
static inline IntVec SplatInt(int32_t x) { return x - IntVec{}; }
static inline int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t Lesser(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t Greater(int64_t a, int64_t b) { return a > b ? a : b; }

#include "jagged_attention/visibility.inc.h"
#include "jagged_attention/cpu/engine_gemm.inc.h"
#include "jagged_attention/cpu/engine_math.inc.h"
#include "jagged_attention/cpu/engine_masks.inc.h"
#include "jagged_attention/cpu/engine_bias.inc.h"
#include "jagged_attention/cpu/engine_panel.inc.h"
#include "jagged_attention/cpu/engine_short.inc.h"
#include "jagged_attention/cpu/engine_attention.inc.h"
#include "jagged_attention/cpu/engine_channels.inc.h"
#include "jagged_attention/cpu/engine_gate.inc.h"
