// SiLU attention of rows of one panel. Moving their numbers costs more than their products. All scores of a head stand
// in one tile. Every product sums over all of its depth in registers, reads tokens as they lie in their tensors, and
// writes its result in place. No rows are padded, cleared, turned round or copied out.

// A bias has sums over all heads, and rows that are no multiple of vectors need padding. These take the long way, as do
// rows with fewer queries than keys.
static inline bool IsShort(const AttentionProblem& p, const AttentionUnit& unit) {
  return RowLength(p, unit.row) <= kPanel && FirstQuery(p, unit.row) == 0 && p.qk_dim % kLanes == 0 &&
         p.value_dim % kLanes == 0 && !HasBias(p.tables);
}

struct ShortScratch {
  ShortScratch(const AttentionProblem& p, float* base) : memory(base) {
    query = memory.Take(p.qk_dim * kPanel);
    grads = memory.Take(p.value_dim * kPanel);
    score = memory.Take(kPanel * kPanel);
    weight_grads = memory.Take(kPanel * kPanel);
  }

  Scratch memory;
  float *query, *grads, *score, *weight_grads;
};

struct ShortRow {
  ShortRow(const AttentionProblem& p, const AttentionUnit& unit)
      : token(p.row_splits[unit.row]), query_token(p.query_splits[unit.row]),
        length(p.row_splits[unit.row + 1] - token) {
    const RowMask row = MaskOf(p, unit.row);
    SetPanel(row, 0, length, &mask);
    triangle = row.top == row.length && row.window == 0;
    const Factor factor = {1.0f, p.scale + query_token * p.scale_stride, p.scale_stride};
    for (int64_t lane = 0; lane < kPanel; lane += kLanes) Store(scale + lane, LanesOf(factor, lane, length));
    Tiles walk(mask, 0, length);
    while (walk.Next(tiles + num_tiles)) {
      const Tile& tile = tiles[num_tiles++];
      for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) last_key[lane / kLanes] = tile.key_end;
    }
  }

  // Vectors of the tile from here on see all of it.
  int64_t MaskedEnd(const Tile& tile) const {
    if (mask.dropped > 0) return tile.lane_end;
    return !tile.masked ? tile.lane_begin : triangle ? Lesser(tile.key_end, tile.lane_end) : tile.lane_end;
  }

  // Only a triangle has no holes between the tiles that are visited.
  void Clear(float* scores) const {
    if (!triangle) Zero(scores, length * kPanel);
  }

  // c[queries, columns] = a^T b with a a tile of scores; keys that a query does not see are left out.
  void SumOverKeys(const float* a, const float* b, int64_t columns, int64_t stride, float* c) const {
    for (int64_t lane = 0; lane < length; lane += kGroup) {
      const int64_t lanes = Lesser(kGroup, length - lane);
      Multiply<true, false>(lanes, columns, last_key[(lane + lanes - 1) / kLanes], a + lane, kPanel, b, stride,
                            c + lane * stride, stride);
    }
  }

  static constexpr int64_t kGroup = kFine;  // queries that see almost the same keys

  const int64_t token, query_token, length;  // first of the keys and of the queries; both have this length
  bool triangle;
  PanelMask mask;
  float scale[kPanel];
  Tile tiles[kPanel / kFine];
  int64_t num_tiles = 0;
  int64_t last_key[kPanel / kLanes] = {};
};

static void ForwardShort(const AttentionProblem& p, const AttentionUnit& unit, float* memory) {
  const ShortScratch scratch(p, memory);
  ShortRow row(p, unit);
  const int64_t qk_stride = p.heads * p.qk_dim, value_stride = p.heads * p.value_dim;
  row.Clear(scratch.score);
  for (int64_t head = unit.head_begin; head < unit.head_end; ++head) {
    SetHead(p, unit.row, head, &row.mask);
    const int64_t qk_at = row.token * qk_stride + head * p.qk_dim;
    const int64_t value_at = row.token * value_stride + head * p.value_dim;
    const int64_t query_at = row.query_token * qk_stride + head * p.qk_dim;
    const int64_t out_at = row.query_token * value_stride + head * p.value_dim;
    Transpose({p.query + query_at, qk_stride}, row.length, p.qk_dim, {p.alpha, nullptr, 0}, scratch.query);
    for (int64_t t = 0; t < row.num_tiles; ++t) {
      const Tile& tile = row.tiles[t];
      float* score = scratch.score + tile.key_begin * kPanel;
      Multiply<false, false>(tile.keys(), tile.lanes(), p.qk_dim, p.key + qk_at + tile.key_begin * qk_stride, qk_stride,
                             scratch.query + tile.lane_begin, kPanel, score + tile.lane_begin, kPanel);
      const int64_t masked_end = row.MaskedEnd(tile);
      for (int64_t key = tile.key_begin; key < tile.key_end; ++key, score += kPanel) {
        for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) {
          const Vec x = Load(score + lane);
          Vec weight = x * Sigmoid(x) * Load(row.scale + lane);
          if (lane < masked_end) weight = (Vec)((IntVec)weight & VisibleLanes(row.mask, lane, key));
          Store(score + lane, weight);
        }
      }
    }
    row.SumOverKeys(scratch.score, p.value + value_at, p.value_dim, value_stride, p.out + out_at);
  }
}

// score = s SiLU(score), weight_grads *= alpha SiLU'(score) with s the scale of the query; 0 where hidden.
static inline void SiluGradShort(const ShortRow& row, const Tile& tile, float alpha, float* score,
                                 float* weight_grads) {
  const int64_t masked_end = row.MaskedEnd(tile);
  for (int64_t key = tile.key_begin; key < tile.key_end; ++key, score += kPanel, weight_grads += kPanel) {
    for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) {
      const SiluAt at(Load(score + lane));
      Vec weight = at.weight * Load(row.scale + lane), grad = Load(weight_grads + lane) * at.slope * Splat(alpha);
      if (lane < masked_end) {
        const IntVec visible = VisibleLanes(row.mask, lane, key);
        weight = (Vec)((IntVec)weight & visible);
        grad = (Vec)((IntVec)grad & visible);
      }
      Store(score + lane, weight);
      Store(weight_grads + lane, grad);
    }
  }
}

// As Backward; with s the scale and y, dx as there: dv = (s y)^T g, dq = (alpha dx) k, dk = (alpha dx)^T q.
static void BackwardShort(const AttentionProblem& p, const AttentionUnit& unit, float* memory) {
  const ShortScratch scratch(p, memory);
  ShortRow row(p, unit);
  const int64_t qk_stride = p.heads * p.qk_dim, value_stride = p.heads * p.value_dim;
  const Factor scale = {1.0f, p.scale + row.query_token * p.scale_stride, p.scale_stride};
  row.Clear(scratch.weight_grads);
  for (int64_t head = unit.head_begin; head < unit.head_end; ++head) {
    SetHead(p, unit.row, head, &row.mask);
    const int64_t qk_at = row.token * qk_stride + head * p.qk_dim;
    const int64_t value_at = row.token * value_stride + head * p.value_dim;
    const int64_t query_at = row.query_token * qk_stride + head * p.qk_dim;
    const int64_t out_at = row.query_token * value_stride + head * p.value_dim;
    Transpose({p.query + query_at, qk_stride}, row.length, p.qk_dim, {p.alpha, nullptr, 0}, scratch.query);
    Transpose({p.grads + out_at, value_stride}, row.length, p.value_dim, scale, scratch.grads);
    for (int64_t t = 0; t < row.num_tiles; ++t) {
      const Tile& tile = row.tiles[t];
      const int64_t lane = tile.lane_begin, keys = tile.keys(), queries = Lesser(tile.lane_end, row.length) - lane;
      const int64_t qk_key = qk_at + tile.key_begin * qk_stride, qk_query = query_at + lane * qk_stride;
      const int64_t value_key = value_at + tile.key_begin * value_stride, value_query = out_at + lane * value_stride;
      float* score = scratch.score + tile.key_begin * kPanel;
      float* weight_grads = scratch.weight_grads + tile.key_begin * kPanel;
      Multiply<false, false>(keys, tile.lanes(), p.qk_dim, p.key + qk_key, qk_stride, scratch.query + lane, kPanel,
                             score + lane, kPanel);
      Multiply<false, false>(keys, tile.lanes(), p.value_dim, p.value + value_key, value_stride, scratch.grads + lane,
                             kPanel, weight_grads + lane, kPanel);
      SiluGradShort(row, tile, p.alpha, score, weight_grads);
      Multiply<false, false>(keys, p.value_dim, queries, score + lane, kPanel, p.grads + value_query, value_stride,
                             p.value_grads + value_key, value_stride);
      Multiply<false, false>(keys, p.qk_dim, queries, weight_grads + lane, kPanel, p.query + qk_query, qk_stride,
                             p.key_grads + qk_key, qk_stride);
    }
    row.SumOverKeys(scratch.weight_grads, p.key + qk_at, p.qk_dim, qk_stride, p.query_grads + query_at);
  }
}
