// SiLU attention, one unit at a time. Scores stand in tiles [keys, kPanel], queries in the lanes. Keys and values are
// read as they lie in their tensors. Only a panel's queries (and gradients) are transposed.

// Keys that a forward unit copies and works on at a time.
constexpr int64_t kForwardKeys = 256;

struct AttentionScratch {
  // panels: of queries that are held at the same time; keys: that are held at the same time.
  AttentionScratch(const AttentionProblem& p, bool backward, int64_t panels, int64_t keys, int64_t heads, float* base)
      : memory(base) {
    key_width = SpreadWidth(p.qk_dim);
    value_width = SpreadWidth(p.value_dim);
    query = memory.Take(panels * heads * p.qk_dim * kPanel);
    result = memory.Take(panels * heads * Greater(p.qk_dim, p.value_dim) * kPanel);
    key = memory.Take(heads * keys * key_width);
    value = memory.Take(heads * keys * value_width);
    score = memory.Take(kTileKeys * kPanel);
    bias = memory.Take(kTileKeys * kPanel);
    time_bias = memory.Take(kTileKeys * kPanel);
    buckets = memory.TakeInts(kTileKeys * kPanel);
    if (!backward) return;
    query_grads_width = RoundUp(p.qk_dim, kLanes);
    value_grads_width = RoundUp(p.value_dim, kLanes);
    grads = memory.Take(heads * p.value_dim * kPanel);
    weight_grads = memory.Take(kTileKeys * kPanel);
    bias_grads = memory.Take(kTileKeys * kPanel);
    query_rows = memory.Take(heads * kPanel * query_grads_width);
    grad_rows = memory.Take(heads * kPanel * value_grads_width);
    key_grads = memory.Take(heads * keys * query_grads_width);
    value_grads = memory.Take(heads * keys * value_grads_width);
    time_sums = memory.Take(TimeSums(p.tables) * kLanes);
    time_totals = memory.Take(TimeSums(p.tables) * kLanes);
  }

  Scratch memory;
  int64_t key_width, value_width, query_grads_width = 0, value_grads_width = 0;
  float *query, *result, *key, *value, *score, *bias, *time_bias, *grads = nullptr, *weight_grads = nullptr,
        *bias_grads = nullptr, *query_rows = nullptr, *grad_rows = nullptr, *key_grads = nullptr,
        *value_grads = nullptr, *time_sums = nullptr, *time_totals = nullptr;
  int32_t* buckets;
};

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
template <bool kBiased, bool kMasked>
static inline void SiluGradTile(const PanelMask& mask, const Tile& tile, const float* bias, float* score,
                                float* weight_grads) {
  for (int64_t key = tile.key_begin; key < tile.key_end;
       ++key, score += kPanel, weight_grads += kPanel, bias += kBiased ? kPanel : 0) {
    for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) {
      Vec x = Load(score + lane);
      if (kBiased) x += Load(bias + lane);
      const SiluAt at(x);
      Vec weight = at.weight, grad = Load(weight_grads + lane) * at.slope;
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

// Calls f<biased, masked>(...) as the tile needs it.
#define FUSEDREC_TILE_CASES(f, biased, masked, ...)                          \
  ((biased) ? ((masked) ? f<true, true>(__VA_ARGS__) : f<true, false>(__VA_ARGS__)) \
            : ((masked) ? f<false, true>(__VA_ARGS__) : f<false, false>(__VA_ARGS__)))

static inline Factor ScaleOf(const AttentionProblem& p, int64_t token) {
  return {1.0f, p.scale + token * p.scale_stride, p.scale_stride};
}

// Keys and values of some places: of head h of the unit, place n, at key + h * key_head + n * key_stride.
struct HeldKeys {
  const float *key, *value;
  int64_t key_stride, value_stride, key_head, value_head;

  const float* KeyAt(int64_t h, int64_t n) const { return key + h * key_head + n * key_stride; }
  const float* ValueAt(int64_t h, int64_t n) const { return value + h * value_head + n * value_stride; }
};

// Keys and values of places [begin, end) for so many queries. They are copied in the order of memory, so that many panels
// read them without conflicts in the cache. When only one panel reads them, they stay in their tensors.
static inline HeldKeys HoldKeys(const AttentionProblem& p, const AttentionUnit& unit, int64_t begin, int64_t end,
                                int64_t queries, int64_t room, const AttentionScratch& scratch) {
  const int64_t start = p.row_splits[unit.row];
  if (queries <= kPanel) {
    const int64_t first = (start + begin) * p.heads + unit.head_begin;
    return {p.key + first * p.qk_dim, p.value + first * p.value_dim, p.heads * p.qk_dim, p.heads * p.value_dim,
            p.qk_dim, p.value_dim};
  }
  for (int64_t place = begin; place < end; ++place) {
    for (int64_t head = unit.head_begin; head < unit.head_end; ++head) {
      const int64_t from = (start + place) * p.heads + head, to = (head - unit.head_begin) * room + place - begin;
      CopyRow(p.key + from * p.qk_dim, p.qk_dim, scratch.key + to * scratch.key_width);
      CopyRow(p.value + from * p.value_dim, p.value_dim, scratch.value + to * scratch.value_width);
    }
  }
  return {scratch.key, scratch.value, scratch.key_width, scratch.value_width, room * scratch.key_width,
          room * scratch.value_width};
}

// The queries of a unit against all keys: keys in blocks, which are copied once; panels of queries inside.
static void Forward(const AttentionProblem& p, const AttentionUnit& unit, float* memory) {
  if (IsShort(p, unit)) return ForwardShort(p, unit, memory);
  const int64_t heads = unit.head_end - unit.head_begin, start = QueryStart(p, unit.row);
  const int64_t panels = RoundUp(unit.end - unit.begin, kPanel) / kPanel;
  const AttentionScratch scratch(p, false, panels, kForwardKeys, heads, memory);
  const RowMask row = MaskOf(p, unit.row);
  const bool biased = HasBias(p.tables);
  const int64_t query_size = p.qk_dim * kPanel, result_size = p.value_dim * kPanel;
  PanelMask mask;
  PanelBias bias;
  if (biased) SetBiasRow(p, unit.row, &bias);
  for (int64_t n = 0; n < panels * heads; ++n) {
    const int64_t begin = unit.begin + n / heads * kPanel, head = unit.head_begin + n % heads;
    const Rows queries = {p.query + ((start + begin) * p.heads + head) * p.qk_dim, p.heads * p.qk_dim};
    Transpose(queries, Lesser(kPanel, unit.end - begin), p.qk_dim, {p.alpha, nullptr, 0},
              scratch.query + n * query_size);
  }
  Zero(scratch.result, panels * heads * result_size);
  const int64_t last_key = LastVisible(row, unit.end);
  for (int64_t first = 0; first < last_key; first += kForwardKeys) {
    const int64_t last = Lesser(first + kForwardKeys, last_key);
    if (Classify(row, unit.begin, unit.end, first, last) == Visible::kNone) continue;
    const HeldKeys held = HoldKeys(p, unit, first, last, unit.end - unit.begin, kForwardKeys, scratch);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t begin = unit.begin + panel * kPanel;
      SetPanel(row, begin, Lesser(begin + kPanel, unit.end), &mask);
      if (biased) SetBiasPanel(p, unit.row, mask, &bias);
      Tiles tiles(mask, first, last);
      for (Tile tile; tiles.Next(&tile);) {
        if (biased) FillBias(bias, tile, scratch);
        const int64_t lane = tile.lane_begin, lanes = tile.lanes(), keys = tile.keys();
        for (int64_t h = 0; h < heads; ++h) {
            const int64_t key = tile.key_begin - first, n = panel * heads + h;
          Multiply<false, false>(keys, lanes, p.qk_dim, held.KeyAt(h, key), held.key_stride,
                                 scratch.query + n * query_size + lane, kPanel, scratch.score + lane, kPanel);
          SetHead(p, unit.row, unit.head_begin + h, &mask);
          const bool masked = tile.masked || p.dropped > 0;
          FUSEDREC_TILE_CASES(SiluTile, biased, masked, mask, tile, scratch.bias, scratch.score);
          Multiply<true, true>(p.value_dim, lanes, keys, held.ValueAt(h, key), held.value_stride, scratch.score + lane,
                               kPanel, scratch.result + n * result_size + lane, kPanel);
        }
      }
    }
  }
  for (int64_t n = 0; n < panels * heads; ++n) {
    const int64_t begin = unit.begin + n / heads * kPanel, head = unit.head_begin + n % heads;
    TransposeBack(scratch.result + n * result_size, Lesser(kPanel, unit.end - begin), p.value_dim,
        ScaleOf(p, start + begin), p.out + ((start + begin) * p.heads + head) * p.value_dim, p.heads * p.value_dim);
  }
}

// The queries of a panel times alpha, and the gradients of their outputs times the scale, both ways.
static inline void PackPanel(const AttentionProblem& p, const AttentionUnit& unit, int64_t begin, int64_t count,
                             const AttentionScratch& scratch) {
  const int64_t token = QueryStart(p, unit.row) + begin;
  const Factor alpha = {p.alpha, nullptr, 0}, scale = ScaleOf(p, token);
  for (int64_t h = 0; h < unit.head_end - unit.head_begin; ++h) {
    const int64_t head = unit.head_begin + h;
    const Rows queries = {p.query + (token * p.heads + head) * p.qk_dim, p.heads * p.qk_dim};
    const Rows grads = {p.grads + (token * p.heads + head) * p.value_dim, p.heads * p.value_dim};
    Transpose(queries, count, p.qk_dim, alpha, scratch.query + h * p.qk_dim * kPanel);
    Transpose(grads, count, p.value_dim, scale, scratch.grads + h * p.value_dim * kPanel);
    Pad(queries, count, p.qk_dim, scratch.query_grads_width, alpha,
        scratch.query_rows + h * kPanel * scratch.query_grads_width);
    Pad(grads, count, p.value_dim, scratch.value_grads_width, scale,
        scratch.grad_rows + h * kPanel * scratch.value_grads_width);
  }
}

// Computes the gradients of the keys of a unit, the share of these keys in the gradients of the queries, and the sums of
// the bias. With x the score, y = SiLU(x), g the gradient of the output times the scale:
//   dv = y^T g;   dx = (g v^T) SiLU'(x);   dq = alpha dx k;   dk = dx^T (alpha q);   dbias = dx
static void Backward(const AttentionProblem& p, const AttentionUnit& unit, float* memory) {
  if (IsShort(p, unit)) return BackwardShort(p, unit, memory);
  const int64_t heads = unit.head_end - unit.head_begin, start = p.row_splits[unit.row];
  const int64_t unit_keys = unit.end - unit.begin;
  const AttentionScratch scratch(p, true, 1, unit_keys, heads, memory);
  const int64_t key_width = scratch.query_grads_width, value_width = scratch.value_grads_width;
  const RowMask row = MaskOf(p, unit.row);
  const bool biased = HasBias(p.tables);
  PanelMask mask;
  PanelBias bias;
  if (biased) SetBiasRow(p, unit.row, &bias);
  const HeldKeys held = HoldKeys(p, unit, unit.begin, unit.end, row.length - unit.query_begin, unit_keys, scratch);
  Zero(scratch.key_grads, heads * unit_keys * key_width);
  Zero(scratch.value_grads, heads * unit_keys * value_width);
  Zero(scratch.time_sums, TimeSums(p.tables) * kLanes);
  Zero(scratch.time_totals, TimeSums(p.tables) * kLanes);
  // The gradients of the unit's first query and head.
  const bool shared = unit.query_grads != nullptr;
  const int64_t query_grads_stride = (shared ? heads : p.heads) * p.qk_dim;
  const int64_t first_query = QueryStart(p, unit.row) + unit.query_begin;
  float* query_grads = shared ? unit.query_grads : p.query_grads + (first_query * p.heads + unit.head_begin) * p.qk_dim;
  for (int64_t begin = unit.query_begin; begin < row.length; begin += kPanel) {
    const int64_t end = Lesser(begin + kPanel, row.length), count = end - begin;
    SetPanel(row, begin, end, &mask);
    if (biased) SetBiasPanel(p, unit.row, mask, &bias);
    Zero(scratch.result, heads * p.qk_dim * kPanel);
    Tiles tiles(mask, unit.begin, unit.end);
    bool packed = false;
    for (Tile tile; tiles.Next(&tile);) {
      if (!packed) PackPanel(p, unit, begin, count, scratch);
      packed = true;
      if (biased) FillBias(bias, tile, scratch);
      const int64_t lane = tile.lane_begin, lanes = tile.lanes(), keys = tile.keys();
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = h * unit_keys + tile.key_begin - unit.begin;
        const float* key = held.KeyAt(h, tile.key_begin - unit.begin);
        Multiply<false, false>(keys, lanes, p.qk_dim, key, held.key_stride,
                               scratch.query + h * p.qk_dim * kPanel + lane, kPanel, scratch.score + lane, kPanel);
        Multiply<false, false>(keys, lanes, p.value_dim, held.ValueAt(h, tile.key_begin - unit.begin),
                               held.value_stride, scratch.grads + h * p.value_dim * kPanel + lane, kPanel,
                               scratch.weight_grads + lane, kPanel);
        SetHead(p, unit.row, unit.head_begin + h, &mask);
        const bool masked = tile.masked || p.dropped > 0;
        FUSEDREC_TILE_CASES(SiluGradTile, biased, masked, mask, tile, scratch.bias, scratch.score,
                            scratch.weight_grads);
        Multiply<true, true>(p.qk_dim, lanes, keys, key, held.key_stride, scratch.weight_grads + lane, kPanel,
                             scratch.result + h * p.qk_dim * kPanel + lane, kPanel);
        Multiply<false, true>(keys, value_width, lanes, scratch.score + lane, kPanel,
                              scratch.grad_rows + (h * kPanel + lane) * value_width, value_width,
                              scratch.value_grads + at * value_width, value_width);
        Multiply<false, true>(keys, key_width, lanes, scratch.weight_grads + lane, kPanel,
                              scratch.query_rows + (h * kPanel + lane) * key_width, key_width,
                              scratch.key_grads + at * key_width, key_width);
        if (biased && heads > 1) AddTile(tile, scratch.weight_grads, h == 0, scratch.bias_grads);
      }
      if (!biased) continue;
      const float* sums = heads > 1 ? scratch.bias_grads : scratch.weight_grads;
      if (p.tables.position != nullptr) {
        AddPositionGrads(bias, tile, sums, unit.query_begin - unit.end + 1, unit.position_grads);
      }
      if (p.tables.time != TimeMap::kNone) AddTimeGrads(bias, tile, scratch.buckets, sums, scratch.time_sums);
    }
    for (int64_t h = 0; h < heads; ++h) {
      TransposeBack(scratch.result + h * p.qk_dim * kPanel, count, p.qk_dim, {p.alpha, nullptr, 0},
                    query_grads + (begin - unit.query_begin) * query_grads_stride + h * p.qk_dim, query_grads_stride);
    }
    if (biased && packed) MoveTimeSums(p.tables, scratch.time_sums, scratch.time_totals);
  }
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t token = (start + unit.begin) * p.heads + unit.head_begin + h;
    Unpad(scratch.key_grads + h * unit_keys * key_width, unit_keys, p.qk_dim, key_width, p.key_grads + token * p.qk_dim,
          p.heads * p.qk_dim);
    Unpad(scratch.value_grads + h * unit_keys * value_width, unit_keys, p.value_dim, value_width,
          p.value_grads + token * p.value_dim, p.heads * p.value_dim);
  }
  if (biased) WriteTimeGrads(p.tables, scratch.time_totals, unit.time_grads);
}

static int64_t AttentionScratchFloats(const AttentionProblem& p, bool backward, int64_t places, int64_t heads) {
  const int64_t panels = backward ? 1 : RoundUp(places, kPanel) / kPanel;
  return Greater(AttentionScratch(p, backward, panels, backward ? places : kForwardKeys, heads, nullptr).memory.used(),
                 ShortScratch(p, nullptr).memory.used());
}
