// SiLU attention, one unit at a time. Scores stand in tiles [keys, kPanel], queries in the lanes: keys and values are
// read as they lie in their tensors, and only a panel's queries (and gradients) are transposed.

struct AttentionScratch {
  explicit AttentionScratch(const AttentionProblem& p, int64_t keys, int64_t heads, float* base) : memory(base) {
    qk_width = RoundUp(p.qk_dim, kLanes);
    value_width = RoundUp(p.value_dim, kLanes);
    query = memory.Take(heads * p.qk_dim * kPanel);
    result = memory.Take(heads * Greater(p.qk_dim, p.value_dim) * kPanel);
    score = memory.Take(kTileKeys * kPanel);
    bias = memory.Take(kTileKeys * kPanel);
    time_bias = memory.Take(kTileKeys * kPanel);
    buckets = memory.TakeInts(kTileKeys * kPanel);
    if (keys == 0) return;
    grads = memory.Take(heads * p.value_dim * kPanel);
    weight_grads = memory.Take(kTileKeys * kPanel);
    bias_grads = memory.Take(kTileKeys * kPanel);
    query_rows = memory.Take(heads * kPanel * qk_width);
    grad_rows = memory.Take(heads * kPanel * value_width);
    key_grads = memory.Take(heads * keys * qk_width);
    value_grads = memory.Take(heads * keys * value_width);
    time_sums = memory.Take(TimeSums(p.bias) * kLanes);
  }

  Scratch memory;
  int64_t qk_width, value_width;
  float *query, *result, *score, *bias, *time_bias, *grads = nullptr, *weight_grads = nullptr,
      *bias_grads = nullptr, *query_rows = nullptr, *grad_rows = nullptr, *key_grads = nullptr, *value_grads = nullptr,
      *time_sums = nullptr;
  int32_t* buckets;
};

static inline bool HasBias(const BiasTables& bias) {
  return bias.position != nullptr || bias.time != TimeMap::kNone;
}

// The sum of the parts that there are, in scratch.bias.
static inline void FillBias(const PanelBias& bias, const Tile& tile, const AttentionScratch& scratch) {
  if (bias.tables->position == nullptr) {
    FillTime(bias, tile, scratch.buckets, scratch.bias);
    return;
  }
  FillPosition(bias, tile, scratch.bias);
  if (bias.tables->time == TimeMap::kNone) return;
  FillTime(bias, tile, scratch.buckets, scratch.time_bias);
  for (int64_t n = 0; n < tile.keys() * kPanel; n += kPanel) {
    for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) {
      Store(scratch.bias + n + lane, Load(scratch.bias + n + lane) + Load(scratch.time_bias + n + lane));
    }
  }
}

// score = SiLU(score + bias) where visible, else 0. bias: nullptr or a tile.
template <bool kBiased, bool kMasked>
static inline void SiluTile(const PanelMask& mask, const Tile& tile, const float* bias, float* score) {
  for (int64_t key = tile.key_begin; key < tile.key_end; ++key, score += kPanel, bias += kBiased ? kPanel : 0) {
    for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) {
      Vec x = Load(score + lane);
      if (kBiased) x += Load(bias + lane);
      Vec weight = x * Sigmoid(x);
      if (kMasked) weight = (Vec)((IntVec)weight & VisibleLanes(mask, lane, key));
      Store(score + lane, weight);
    }
  }
}

// score = SiLU(x), weight_grads *= SiLU'(x), x = score + bias; 0 where hidden.
// SiLU'(x) = s + x s (1 - s), s = sigmoid(x).
template <bool kBiased, bool kMasked>
static inline void SiluGradTile(const PanelMask& mask, const Tile& tile, const float* bias, float* score,
                                float* weight_grads) {
  for (int64_t key = tile.key_begin; key < tile.key_end;
       ++key, score += kPanel, weight_grads += kPanel, bias += kBiased ? kPanel : 0) {
    for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) {
      Vec x = Load(score + lane);
      if (kBiased) x += Load(bias + lane);
      const Vec sigmoid = Sigmoid(x);
      Vec weight = x * sigmoid;
      const Vec slope = Fma(weight, Splat(1.0f) - sigmoid, sigmoid);
      Vec grad = Load(weight_grads + lane) * slope;
      if (kMasked) {
        const IntVec visible = VisibleLanes(mask, lane, key);
        weight = (Vec)((IntVec)weight & visible);
        grad = (Vec)((IntVec)grad & visible);
      }
      Store(score + lane, weight);
      Store(weight_grads + lane, grad);
    }
  }
}

// sum (+)= grads, tiles.
static inline void AddTile(const Tile& tile, const float* grads, bool first, float* sum) {
  for (int64_t n = 0; n < tile.keys() * kPanel; n += kPanel) {
    for (int64_t lane = n + tile.lane_begin; lane < n + tile.lane_end; lane += kLanes) {
      Store(sum + lane, first ? Load(grads + lane) : Load(sum + lane) + Load(grads + lane));
    }
  }
}

// Calls f<biased, masked>(...) for what a tile needs.
#define FUSEDREC_TILE_CASES(f, biased, masked, ...)                          \
  ((biased) ? ((masked) ? f<true, true>(__VA_ARGS__) : f<true, false>(__VA_ARGS__)) \
            : ((masked) ? f<false, true>(__VA_ARGS__) : f<false, false>(__VA_ARGS__)))

static inline const float* ScaleOf(const AttentionProblem& p, int64_t token) {
  return p.scale == nullptr ? nullptr : p.scale + token * p.scale_stride;
}

static void Forward(const AttentionProblem& p, const AttentionUnit& unit, float* memory) {
  const int64_t heads = unit.head_end - unit.head_begin, start = p.row_splits[unit.row];
  const AttentionScratch scratch(p, 0, heads, memory);
  const int64_t qk_stride = p.heads * p.qk_dim, value_stride = p.heads * p.value_dim;
  const RowMask row = MaskOf(p, unit.row);
  const bool biased = HasBias(p.bias);
  PanelMask mask;
  PanelBias bias;
  if (biased) SetBiasRow(p, unit.row, &bias);
  for (int64_t begin = unit.begin; begin < unit.end; begin += kPanel) {
    const int64_t end = Lesser(begin + kPanel, unit.end), count = end - begin;
    SetPanel(row, begin, end, &mask);
    if (biased) SetBiasPanel(p, unit.row, mask, &bias);
    for (int64_t h = 0; h < heads; ++h) {
      const Rows queries = {p.query + (start + begin) * qk_stride + (unit.head_begin + h) * p.qk_dim, qk_stride};
      Transpose(queries, count, p.qk_dim, p.alpha, nullptr, 0, scratch.query + h * p.qk_dim * kPanel);
    }
    Zero(scratch.result, heads * p.value_dim * kPanel);
    Tiles tiles(mask, 0, row.length);
    for (Tile tile; tiles.Next(&tile);) {
      if (biased) FillBias(bias, tile, scratch);
      const int64_t lane = tile.lane_begin, lanes = tile.lanes(), keys = tile.keys();
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t token = start + tile.key_begin, head = unit.head_begin + h;
        Multiply<false>(keys, lanes, p.qk_dim, p.key + token * qk_stride + head * p.qk_dim, qk_stride,
                        scratch.query + h * p.qk_dim * kPanel + lane, kPanel, scratch.score + lane, kPanel, false);
        FUSEDREC_TILE_CASES(SiluTile, biased, tile.masked, mask, tile, scratch.bias, scratch.score);
        Multiply<true>(p.value_dim, lanes, keys, p.value + token * value_stride + head * p.value_dim, value_stride,
                       scratch.score + lane, kPanel, scratch.result + h * p.value_dim * kPanel + lane, kPanel, true);
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      TransposeBack(scratch.result + h * p.value_dim * kPanel, count, p.value_dim, 1.0f, ScaleOf(p, start + begin),
                    p.scale_stride, p.out + (start + begin) * value_stride + (unit.head_begin + h) * p.value_dim,
                    value_stride);
    }
  }
}

// Of the keys of a unit: their gradients, the gradients of the queries as far as they come from these keys, and the
// sums of the bias. With x the score, y = SiLU(x), g the gradient of the output times the scale:
//   dv = y^T g;   dx = (g v^T) SiLU'(x);   dq = alpha dx k;   dk = dx^T (alpha q);   dbias = dx
static void Backward(const AttentionProblem& p, const AttentionUnit& unit, float* memory) {
  const int64_t heads = unit.head_end - unit.head_begin, start = p.row_splits[unit.row];
  const int64_t unit_keys = unit.end - unit.begin;
  const AttentionScratch scratch(p, unit_keys, heads, memory);
  const int64_t qk_stride = p.heads * p.qk_dim, value_stride = p.heads * p.value_dim;
  const int64_t qk_width = scratch.qk_width, value_width = scratch.value_width;
  const RowMask row = MaskOf(p, unit.row);
  const bool biased = HasBias(p.bias), bias_grads = biased && p.bias_grads;
  PanelMask mask;
  PanelBias bias;
  if (biased) SetBiasRow(p, unit.row, &bias);
  Zero(scratch.key_grads, heads * unit_keys * qk_width);
  Zero(scratch.value_grads, heads * unit_keys * value_width);
  Zero(scratch.time_sums, TimeSums(p.bias) * kLanes);
  // Where the gradients of the unit's first query and head go.
  float* query_grads = unit.query_grads;
  int64_t query_grads_stride = heads * p.qk_dim;
  if (query_grads == nullptr) {
    query_grads = p.query_grads + (start + unit.query_begin) * qk_stride + unit.head_begin * p.qk_dim;
    query_grads_stride = qk_stride;
  }
  for (int64_t begin = unit.query_begin; begin < row.length; begin += kPanel) {
    const int64_t end = Lesser(begin + kPanel, row.length), count = end - begin;
    SetPanel(row, begin, end, &mask);
    if (biased) SetBiasPanel(p, unit.row, mask, &bias);
    Zero(scratch.result, heads * p.qk_dim * kPanel);
    Tiles tiles(mask, unit.begin, unit.end);
    bool packed = false;
    for (Tile tile; tiles.Next(&tile);) {
      for (int64_t h = 0; h < heads && !packed; ++h) {
        const int64_t token = start + begin, head = unit.head_begin + h;
        const Rows queries = {p.query + token * qk_stride + head * p.qk_dim, qk_stride};
        const Rows grads = {p.grads + token * value_stride + head * p.value_dim, value_stride};
        const float* scale = ScaleOf(p, token);
        Transpose(queries, count, p.qk_dim, p.alpha, nullptr, 0, scratch.query + h * p.qk_dim * kPanel);
        Transpose(grads, count, p.value_dim, 1.0f, scale, p.scale_stride, scratch.grads + h * p.value_dim * kPanel);
        Pad(queries, count, p.qk_dim, qk_width, p.alpha, nullptr, 0, scratch.query_rows + h * kPanel * qk_width);
        Pad(grads, count, p.value_dim, value_width, 1.0f, scale, p.scale_stride,
            scratch.grad_rows + h * kPanel * value_width);
      }
      packed = true;
      if (biased) FillBias(bias, tile, scratch);
      const int64_t lane = tile.lane_begin, lanes = tile.lanes(), keys = tile.keys();
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t token = start + tile.key_begin, head = unit.head_begin + h;
        const float* key = p.key + token * qk_stride + head * p.qk_dim;
        const float* value = p.value + token * value_stride + head * p.value_dim;
        Multiply<false>(keys, lanes, p.qk_dim, key, qk_stride, scratch.query + h * p.qk_dim * kPanel + lane, kPanel,
                        scratch.score + lane, kPanel, false);
        Multiply<false>(keys, lanes, p.value_dim, value, value_stride, scratch.grads + h * p.value_dim * kPanel + lane,
                        kPanel, scratch.weight_grads + lane, kPanel, false);
        FUSEDREC_TILE_CASES(SiluGradTile, biased, tile.masked, mask, tile, scratch.bias, scratch.score,
                            scratch.weight_grads);
        Multiply<true>(p.qk_dim, lanes, keys, key, qk_stride, scratch.weight_grads + lane, kPanel,
                       scratch.result + h * p.qk_dim * kPanel + lane, kPanel, true);
        const int64_t at = h * unit_keys + tile.key_begin - unit.begin;
        Multiply<false>(keys, value_width, lanes, scratch.score + lane, kPanel,
                        scratch.grad_rows + (h * kPanel + lane) * value_width, value_width,
                        scratch.value_grads + at * value_width, value_width, true);
        Multiply<false>(keys, qk_width, lanes, scratch.weight_grads + lane, kPanel,
                        scratch.query_rows + (h * kPanel + lane) * qk_width, qk_width,
                        scratch.key_grads + at * qk_width, qk_width, true);
        if (bias_grads && heads > 1) AddTile(tile, scratch.weight_grads, h == 0, scratch.bias_grads);
      }
      if (!bias_grads) continue;
      const float* sums = heads > 1 ? scratch.bias_grads : scratch.weight_grads;
      if (p.bias.position != nullptr) {
        AddPositionGrads(bias, tile, sums, unit.query_begin - unit.end + 1, unit.position_grads);
      }
      if (p.bias.time != TimeMap::kNone) AddTimeGrads(bias, tile, scratch.buckets, sums, scratch.time_sums);
    }
    for (int64_t h = 0; h < heads; ++h) {
      TransposeBack(scratch.result + h * p.qk_dim * kPanel, count, p.qk_dim, p.alpha, nullptr, 0,
                    query_grads + (begin - unit.query_begin) * query_grads_stride + h * p.qk_dim, query_grads_stride);
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t token = start + unit.begin, head = unit.head_begin + h;
    Unpad(scratch.key_grads + h * unit_keys * qk_width, unit_keys, p.qk_dim, qk_width,
          p.key_grads + token * qk_stride + head * p.qk_dim, qk_stride);
    Unpad(scratch.value_grads + h * unit_keys * value_width, unit_keys, p.value_dim, value_width,
          p.value_grads + token * value_stride + head * p.value_dim, value_stride);
  }
  if (bias_grads) WriteTimeGrads(p.bias, scratch.time_sums, unit.time_grads);
}
