// The bias of the pairs of a tile, and the gradients of its weights. Tiles are [keys, kPanel].

static inline bool HasBias(const BiasTables& bias) { return bias.position != nullptr || bias.time != TimeMap::kNone; }

struct PanelBias {
  const BiasTables* tables;
  const PanelMask* mask;
  const int64_t* answers;  // of the row
  int64_t targets_from;    // places from here on count as this one
  bool near_times;         // all differences of the row fit BucketCells
  bool ascending;          // no query of the panel asks earlier than the one before, as in a history
  int64_t origin;          // of the 32-bit times below
  int64_t asks[kPanel];
  int32_t near_asks[kPanel] __attribute__((aligned(64)));
};

// The row: which of its tokens are targets, and how far apart its times are.
static inline void SetBiasRow(const AttentionProblem& problem, int64_t row, PanelBias* bias) {
  const BiasTables& tables = problem.tables;
  const int64_t begin = problem.row_splits[row], length = problem.row_splits[row + 1] - begin;
  bias->tables = &tables;
  bias->targets_from = length - (problem.num_targets == nullptr ? 0 : problem.num_targets[row]);
  bias->answers = tables.answers == nullptr ? nullptr : tables.answers + begin;
  bias->near_times = false;
  if (tables.time != TimeMap::kBuckets || length == 0) return;
  int64_t low = tables.answers[begin], high = low;
  for (int64_t t = begin; t < begin + length; ++t) {
    low = Lesser(low, tables.answers[t]);
    high = Greater(high, tables.answers[t]);
  }
  for (int64_t t = problem.query_splits[row]; t < problem.query_splits[row + 1]; ++t) {
    low = Lesser(low, tables.asks[t]);
    high = Greater(high, tables.asks[t]);
  }
  bias->origin = low;
  bias->near_times = static_cast<uint64_t>(high) - static_cast<uint64_t>(low) < uint64_t{INT32_MAX};
}

static inline void SetBiasPanel(const AttentionProblem& problem, int64_t row, const PanelMask& mask, PanelBias* bias) {
  bias->mask = &mask;
  if (bias->tables->time == TimeMap::kNone) return;
  const int64_t start = QueryStart(problem, row);
  bias->ascending = true;
  for (int64_t lane = 0; lane < kPanel; ++lane) {
    bias->asks[lane] = bias->tables->asks[start + Lesser(mask.begin + lane, mask.end - 1)];
    if (bias->near_times) bias->near_asks[lane] = static_cast<int32_t>(bias->asks[lane] - bias->origin);
    bias->ascending &= lane == 0 || bias->asks[lane - 1] <= bias->asks[lane];
  }
}

// Returns whether the index of the position weights ascends with the lanes and descends with the keys.
static inline bool PlainPlaces(const PanelBias& bias, const Tile& tile) {
  return bias.mask->begin + tile.lane_end <= bias.targets_from && tile.key_end <= bias.targets_from;
}

static inline int64_t ClampedDistance(const PanelBias& bias, int64_t lane, int64_t key) {
  const int64_t asking = Lesser(Lesser(bias.mask->begin + lane, bias.mask->end - 1), bias.targets_from);
  return asking - Lesser(key, bias.targets_from);
}

// row = number, in the lanes of the tile.
static inline void Repeat(const Tile& tile, float number, float* row) {
  for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) Store(row + lane, Splat(number));
}

static inline void Repeat(const Tile& tile, int32_t number, int32_t* row) {
  for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) StoreInt(row + lane, SplatInt(number));
}

static inline void FillPosition(const PanelBias& bias, const Tile& tile, float* map) {
  const float* centre = bias.tables->position;
  for (int64_t key = tile.key_begin; key < tile.key_end; ++key, map += kPanel) {
    if (PlainPlaces(bias, tile)) {
      const float* weights = centre + bias.mask->begin - key;
      for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) {
        Store(map + lane, Load(weights + lane));
      }
    } else if (bias.mask->begin + tile.lane_begin >= bias.targets_from) {
      Repeat(tile, centre[bias.targets_from - Lesser(key, bias.targets_from)], map);  // All targets have one place.
    } else {
      for (int64_t lane = tile.lane_begin; lane < tile.lane_end; ++lane) {
        map[lane] = centre[ClampedDistance(bias, lane, key)];
      }
    }
  }
}

// sums[i - j - first] += grads of the pair (i, j). Keys are taken in strides of kLanes, so that a sum is not needed
// again before it is written.
static inline void AddPositionGrads(const PanelBias& bias, const Tile& tile, const float* grads, int64_t first,
                                    float* sums) {
  if (!PlainPlaces(bias, tile)) {
    for (int64_t key = tile.key_begin; key < tile.key_end; ++key, grads += kPanel) {
      for (int64_t lane = tile.lane_begin; lane < tile.lane_end; ++lane) {
        sums[ClampedDistance(bias, lane, key) - first] += grads[lane];
      }
    }
    return;
  }
  for (int64_t start = 0; start < kLanes; ++start) {
    for (int64_t key = start; key < tile.keys(); key += kLanes) {
      float* sum = sums + bias.mask->begin - (tile.key_begin + key) - first;
      for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) {
        Store(sum + lane, Load(sum + lane) + Load(grads + key * kPanel + lane));
      }
    }
  }
}

static inline int32_t NearBucket(const BucketCells& cells, int32_t difference) {
  const float number = static_cast<float>(difference);
  int32_t bits;
  __builtin_memcpy(&bits, &number, sizeof(bits));
  int32_t bucket = cells.begin[Lesser(bits >> cells.shift, cells.num_cells - 1)];
  for (int32_t probe = 0; probe < cells.probes; ++probe) bucket += difference >= cells.thresholds[bucket];
  return bucket;
}

static inline int32_t BucketOf(const PanelBias& bias, int64_t lane, int64_t key) {
  if (!bias.near_times) {
    const uint64_t difference = TimeBetween(bias.asks[lane], bias.answers[key]);
    return SearchBucket(bias.tables->thresholds, bias.tables->num_thresholds, difference);
  }
  const int32_t difference = bias.near_asks[lane] - static_cast<int32_t>(bias.answers[key] - bias.origin);
  return NearBucket(bias.tables->cells, difference < 0 ? -difference : difference);
}

// Whether all queries of the tile have one bucket for a key. Then *bucket is that. Between times that ascend, differences
// from a time before or after all of them ascend or descend, and so do their buckets. Most keys of a long history are
// that far away.
static inline bool OneBucket(const PanelBias& bias, const Tile& tile, int64_t key, int32_t* bucket) {
  const int64_t first = tile.lane_begin, last = tile.lane_end - 1, answer = bias.answers[key];
  if (!bias.ascending || (answer > bias.asks[first] && answer < bias.asks[last])) return false;
  *bucket = BucketOf(bias, first, key);
  return bias.asks[first] == bias.asks[last] || *bucket == BucketOf(bias, last, key);
}

// The buckets of one key and times that fit BucketCells.
static inline void NearBuckets(const PanelBias& bias, const Tile& tile, int64_t key, int32_t* buckets) {
  const BucketCells& cells = bias.tables->cells;
  const int32_t *begin = cells.begin, *thresholds = cells.thresholds;
  const int32_t last_cell = cells.num_cells - 1, shift = cells.shift, probes = cells.probes;
  const int32_t answer = static_cast<int32_t>(bias.answers[key] - bias.origin);
  for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) {
    const IntVec signed_difference = LoadInt(bias.near_asks + lane) - SplatInt(answer);
    const IntVec sign = signed_difference >> 31;
    const IntVec difference = (signed_difference ^ sign) - sign;
    const IntVec cell_bits = (IntVec)__builtin_convertvector(difference, Vec) >> shift;
    int32_t cell[kLanes], d[kLanes], bucket[kLanes];
    __builtin_memcpy(cell, &cell_bits, sizeof(cell));
    __builtin_memcpy(d, &difference, sizeof(d));
    for (int l = 0; l < kLanes; ++l) bucket[l] = begin[cell[l] < last_cell ? cell[l] : last_cell];
    for (int32_t probe = 0; probe < probes; ++probe) {
      for (int l = 0; l < kLanes; ++l) bucket[l] += d[l] >= thresholds[bucket[l]];
    }
    __builtin_memcpy(buckets + lane, bucket, sizeof(bucket));
  }
}

static inline void FillBuckets(const PanelBias& bias, const Tile& tile, int32_t* buckets, float* map) {
  const float* weights = bias.tables->weights;
  for (int64_t key = tile.key_begin; key < tile.key_end; ++key, buckets += kPanel, map += kPanel) {
    int32_t bucket;
    if (OneBucket(bias, tile, key, &bucket)) {
      Repeat(tile, bucket, buckets);
      Repeat(tile, weights[bucket], map);
      continue;
    }
    if (bias.near_times) {
      NearBuckets(bias, tile, key, buckets);
    } else {
      for (int64_t lane = tile.lane_begin; lane < tile.lane_end; ++lane) buckets[lane] = BucketOf(bias, lane, key);
    }
    for (int64_t lane = tile.lane_begin; lane < tile.lane_end; ++lane) map[lane] = weights[buckets[lane]];
  }
}

// sums[bucket * kLanes + lane of its vector] += grads: neighbours of one bucket, the usual case, do not wait for each
// other.
static inline void AddBucketGrads(const Tile& tile, const int32_t* buckets, const float* grads, float* sums) {
  for (int64_t key = 0; key < tile.keys(); ++key, buckets += kPanel, grads += kPanel) {
    for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) {
      const int32_t first = buckets[lane];
      const IntVec other = LoadInt(buckets + lane) ^ SplatInt(first);
      int32_t different = 0;
      for (int l = 0; l < kLanes; ++l) different |= other[l];
      if (different == 0) {
        float* sum = sums + first * kLanes;
        Store(sum, Load(sum) + Load(grads + lane));
      } else {
        for (int l = 0; l < kLanes; ++l) sums[buckets[lane + l] * kLanes + l] += grads[lane + l];
      }
    }
  }
}

// A function of time and its derivatives by its parameters, of one vector of differences.
struct TimeValue {
  Vec value;
  Vec slopes[3];
};

static inline TimeValue TimeFunctionAt(const BiasTables& tables, Vec difference) {
  const Vec a = Splat(tables.parameters[0]), b = Splat(tables.parameters[1]);
  TimeValue at;
  if (tables.time == TimeMap::kPower) {
    const Vec log = Log(difference + Splat(1.0f));
    at.slopes[0] = Exp(-b * log);
    at.value = a * at.slopes[0];
    at.slopes[1] = -at.value * log;
  } else if (tables.time == TimeMap::kExponential) {
    const Vec exponent = Exp(b) * difference;
    at.slopes[0] = Exp(-exponent);
    at.value = a * at.slopes[0];
    at.slopes[1] = -at.value * exponent;
  } else {
    const Vec log = Log(difference + Splat(1.0f));
    const Vec power = Exp(Splat(tables.parameters[2]) * log);
    const Vec rate = Max(b, Vec{}) + Log(Splat(1.0f) + Exp(-Max(b, -b)));  // softplus
    at.slopes[0] = Exp(-rate * power);
    at.value = a * at.slopes[0];
    at.slopes[1] = -at.value * power * Sigmoid(b);
    at.slopes[2] = -at.value * rate * power * log;
  }
  return at;
}

static inline Vec PastDifference(const PanelBias& bias, int64_t lane, int64_t answer) {
  Vec difference;
  for (int l = 0; l < kLanes; ++l) {
    const uint64_t ask = bias.asks[lane + l], since = ask - static_cast<uint64_t>(answer);
    difference[l] = bias.asks[lane + l] > answer ? static_cast<float>(since) : 0.0f;
  }
  return difference;
}

static inline void FillTimeFunction(const PanelBias& bias, const Tile& tile, float* map) {
  for (int64_t key = tile.key_begin; key < tile.key_end; ++key, map += kPanel) {
    for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) {
      Store(map + lane, TimeFunctionAt(*bias.tables, PastDifference(bias, lane, bias.answers[key])).value);
    }
  }
}

static inline void AddTimeFunctionGrads(const PanelBias& bias, const Tile& tile, const float* grads, float* sums) {
  const int parameters = bias.tables->time == TimeMap::kStretched ? 3 : 2;
  Vec of_tile[3] = {};
  for (int64_t key = tile.key_begin; key < tile.key_end; ++key, grads += kPanel) {
    for (int64_t lane = tile.lane_begin; lane < tile.lane_end; lane += kLanes) {
      const TimeValue at = TimeFunctionAt(*bias.tables, PastDifference(bias, lane, bias.answers[key]));
      for (int p = 0; p < parameters; ++p) of_tile[p] = Fma(Load(grads + lane), at.slopes[p], of_tile[p]);
    }
  }
  for (int p = 0; p < parameters; ++p) Store(sums + p * kLanes, Load(sums + p * kLanes) + of_tile[p]);
}

static inline int64_t TimeSums(const BiasTables& tables) {
  if (tables.time == TimeMap::kNone) return 0;
  return tables.time == TimeMap::kBuckets ? tables.num_thresholds + 1 : 3;
}

static inline void FillTime(const PanelBias& bias, const Tile& tile, int32_t* buckets, float* map) {
  if (bias.tables->time == TimeMap::kBuckets) {
    FillBuckets(bias, tile, buckets, map);
  } else {
    FillTimeFunction(bias, tile, map);
  }
}

static inline void AddTimeGrads(const PanelBias& bias, const Tile& tile, const int32_t* buckets, const float* grads,
                                float* sums) {
  if (bias.tables->time == TimeMap::kBuckets) {
    AddBucketGrads(tile, buckets, grads, sums);
  } else {
    AddTimeFunctionGrads(bias, tile, grads, sums);
  }
}

// Moves sums on to totals, both in lanes: the fewer numbers a float32 sums up, the better it does.
static inline void MoveTimeSums(const BiasTables& tables, float* sums, float* totals) {
  for (int64_t n = 0; n < TimeSums(tables) * kLanes; n += kLanes) {
    Store(totals + n, Load(totals + n) + Load(sums + n));
    Store(sums + n, Vec{});
  }
}

static inline void WriteTimeGrads(const BiasTables& tables, const float* totals, float* grads) {
  for (int64_t n = 0; n < TimeSums(tables); ++n) {
    float sum = 0.0f;
    for (int64_t l = 0; l < kLanes; ++l) sum += totals[n * kLanes + l];
    grads[n] = sum;
  }
}
