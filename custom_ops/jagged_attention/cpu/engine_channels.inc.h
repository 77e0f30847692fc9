// The channels of FuXi: position map times value, time map times value. A map is the same for all heads, so that the
// heads of a value are the columns of one product; there is no SiLU.

constexpr int kMaxChannels = 2;
constexpr Factor kOne = {1.0f, nullptr, 0};

struct ChannelScratch {
  ChannelScratch(const AttentionProblem& p, int64_t keys, float* base) : memory(base) {
    channels = p.channels;
    columns = p.heads * p.value_dim;
    width = RoundUp(columns, kLanes);
    buckets = memory.TakeInts(kTileKeys * kPanel);
    for (int c = 0; c < kMaxChannels; ++c) {
      map[c] = memory.Take(kTileKeys * kPanel);
      panel[c] = memory.Take(columns * kPanel);
    }
    if (keys == 0) return;
    for (int c = 0; c < kMaxChannels; ++c) grad_rows[c] = memory.Take(kPanel * width);
    map_grads = memory.Take(kTileKeys * kPanel);
    value_grads = memory.Take(keys * width);
    time_sums = memory.Take(TimeSums(p.tables) * kLanes);
    time_totals = memory.Take(TimeSums(p.tables) * kLanes);
  }

  Scratch memory;
  int64_t channels, columns, width;
  int32_t* buckets;
  float *map[kMaxChannels], *panel[kMaxChannels];  // panel: results, or transposed gradients
  float *grad_rows[kMaxChannels] = {}, *map_grads = nullptr, *value_grads = nullptr, *time_sums = nullptr,
        *time_totals = nullptr;
};

// tile = 0 where hidden.
static inline void HideTile(const PanelMask& mask, const Tile& tile, float* map) {
  if (!tile.masked) return;
  for (int64_t key = tile.key_begin; key < tile.key_end; ++key, map += kPanel) {
    for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) {
      Store(map + lane, (Vec)((IntVec)Load(map + lane) & VisibleLanes(mask, lane, key)));
    }
  }
}

// The maps of all channels, position first.
static inline void FillMaps(const PanelBias& bias, const Tile& tile, const ChannelScratch& scratch) {
  int channel = 0;
  if (bias.tables->position != nullptr) FillPosition(bias, tile, scratch.map[channel++]);
  if (bias.tables->time != TimeMap::kNone) FillTime(bias, tile, scratch.buckets, scratch.map[channel++]);
  while (channel-- > 0) HideTile(*bias.mask, tile, scratch.map[channel]);
}

static void ChannelsForward(const AttentionProblem& p, const AttentionUnit& unit, float* memory) {
  const ChannelScratch scratch(p, 0, memory);
  const int64_t start = p.row_splits[unit.row], channels = scratch.channels, columns = scratch.columns;
  const int64_t query_start = QueryStart(p, unit.row);
  const RowMask row = MaskOf(p, unit.row);
  PanelMask mask;
  PanelBias bias;
  SetBiasRow(p, unit.row, &bias);
  for (int64_t begin = unit.begin; begin < unit.end; begin += kPanel) {
    const int64_t end = Lesser(begin + kPanel, unit.end), count = end - begin;
    SetPanel(row, begin, end, &mask);
    SetBiasPanel(p, unit.row, mask, &bias);
    for (int c = 0; c < channels; ++c) Zero(scratch.panel[c], columns * kPanel);
    Tiles tiles(mask, 0, LastVisible(row, end));
    for (Tile tile; tiles.Next(&tile);) {
      FillMaps(bias, tile, scratch);
      for (int c = 0; c < channels; ++c) {
        Multiply<true, true>(columns, tile.lanes(), tile.keys(), p.value + (start + tile.key_begin) * columns, columns,
                       scratch.map[c] + tile.lane_begin, kPanel, scratch.panel[c] + tile.lane_begin, kPanel);
      }
    }
    for (int c = 0; c < channels; ++c) {
      for (int64_t h = 0; h < p.heads; ++h) {
        float* out = p.out + ((query_start + begin) * p.heads + h) * channels * p.value_dim + c * p.value_dim;
        TransposeBack(scratch.panel[c] + h * p.value_dim * kPanel, count, p.value_dim, kOne, out, channels * columns);
      }
    }
  }
}

// With m_c the map of channel c and g_c the gradient of its output:  dv = sum over c of m_c^T g_c;  dm_c = g_c v^T
static void ChannelsBackward(const AttentionProblem& p, const AttentionUnit& unit, float* memory) {
  const int64_t unit_keys = unit.end - unit.begin;
  const ChannelScratch scratch(p, unit_keys, memory);
  const int64_t start = p.row_splits[unit.row], channels = scratch.channels, columns = scratch.columns;
  const int64_t query_start = QueryStart(p, unit.row);
  const int64_t width = scratch.width;
  const RowMask row = MaskOf(p, unit.row);
  PanelMask mask;
  PanelBias bias;
  SetBiasRow(p, unit.row, &bias);
  Zero(scratch.value_grads, unit_keys * width);
  Zero(scratch.time_sums, TimeSums(p.tables) * kLanes);
  Zero(scratch.time_totals, TimeSums(p.tables) * kLanes);
  for (int64_t begin = unit.query_begin; begin < row.length; begin += kPanel) {
    const int64_t end = Lesser(begin + kPanel, row.length), count = end - begin;
    SetPanel(row, begin, end, &mask);
    SetBiasPanel(p, unit.row, mask, &bias);
    Tiles tiles(mask, unit.begin, unit.end);
    bool packed = false;
    for (Tile tile; tiles.Next(&tile);) {
      for (int c = 0; c < channels && !packed; ++c) {
        Zero(scratch.grad_rows[c], kPanel * width);
        for (int64_t h = 0; h < p.heads; ++h) {
          const int64_t at = ((query_start + begin) * p.heads + h) * channels * p.value_dim + c * p.value_dim;
          const Rows grads = {p.grads + at, channels * columns};
          Transpose(grads, count, p.value_dim, kOne, scratch.panel[c] + h * p.value_dim * kPanel);
          for (int64_t i = 0; i < count; ++i) {
            __builtin_memcpy(scratch.grad_rows[c] + i * width + h * p.value_dim, grads.data + i * grads.stride,
                             p.value_dim * sizeof(float));
          }
        }
      }
      packed = true;
      FillMaps(bias, tile, scratch);
      const int64_t lane = tile.lane_begin, lanes = tile.lanes(), keys = tile.keys();
      for (int c = 0; c < channels; ++c) {
        Multiply<false, true>(keys, width, lanes, scratch.map[c] + lane, kPanel, scratch.grad_rows[c] + lane * width,
                              width, scratch.value_grads + (tile.key_begin - unit.begin) * width, width);
        Multiply<false, false>(keys, lanes, columns, p.value + (start + tile.key_begin) * columns, columns,
                        scratch.panel[c] + lane, kPanel, scratch.map_grads + lane, kPanel);
        HideTile(mask, tile, scratch.map_grads);
        if (c == 0 && p.tables.position != nullptr) {
          AddPositionGrads(bias, tile, scratch.map_grads, unit.query_begin - unit.end + 1, unit.position_grads);
        } else {
          AddTimeGrads(bias, tile, scratch.buckets, scratch.map_grads, scratch.time_sums);
        }
      }
    }
    if (packed) MoveTimeSums(p.tables, scratch.time_sums, scratch.time_totals);
  }
  Unpad(scratch.value_grads, unit_keys, columns, width, p.value_grads + (start + unit.begin) * columns, columns);
  WriteTimeGrads(p.tables, scratch.time_totals, unit.time_grads);
}

static int64_t ChannelScratchFloats(const AttentionProblem& p, bool backward, int64_t places, int64_t) {
  return ChannelScratch(p, backward ? places : 0, nullptr).memory.used();
}
