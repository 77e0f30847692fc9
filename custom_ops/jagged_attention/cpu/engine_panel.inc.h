// Scratch memory, and the copies of a panel's tokens: rows of padded length, or transposed with one token per lane.

// Hands out pieces of one allocation; with base nullptr it only counts.
class Scratch {
 public:
  explicit Scratch(float* base) : base_(base) {}

  float* Take(int64_t floats) {
    float* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += RoundUp(floats, 16);  // of 64 bytes
    return piece;
  }
  int32_t* TakeInts(int64_t ints) { return reinterpret_cast<int32_t*>(Take(ints)); }
  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

static inline void Zero(float* p, int64_t floats) { __builtin_memset(p, 0, floats * sizeof(float)); }

// Rows of tokens: row i at data + i * stride.
struct Rows {
  const float* data;
  int64_t stride;
};

// Factors of tokens: a common number, and one number per token when `each` is not nullptr (stride 0: the same number).
struct Factor {
  float common;
  const float* each;
  int64_t stride;

  float Of(int64_t token) const { return each == nullptr ? common : common * each[token * stride]; }
};

// Factors of kLanes tokens from `token` on; 0 for tokens behind `count`.
static inline Vec LanesOf(const Factor& factor, int64_t token, int64_t count) {
  float lanes[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) lanes[l] = token + l < count ? factor.Of(token + l) : 0.0f;
  return Load(lanes);
}

// Width of rows that are read number by number: an odd number of cache lines, so that neighbours do not share a set.
static inline int64_t SpreadWidth(int64_t columns) { return RoundUp(columns, 16) | 16; }

static inline void CopyRow(const float* from, int64_t columns, float* to) {
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) Store(to + c, Load(from + c));
  for (; c < columns; ++c) to[c] = from[c];
}

// In every 4 x 4 numbers that stand in the same quarter-vector (16 bytes) of x[0..3], rows become columns.
static inline void TransposeQuads(Vec* x) {
  IntVec low, high, even, odd;  // masks of shuffles: of pairs, then of pairs of pairs
  for (int l = 0; l < kLanes; l += 4) {
    const int other = l + kLanes;
    low[l] = l, low[l + 1] = other, low[l + 2] = l + 1, low[l + 3] = other + 1;
    high[l] = l + 2, high[l + 1] = other + 2, high[l + 2] = l + 3, high[l + 3] = other + 3;
    even[l] = l, even[l + 1] = l + 1, even[l + 2] = other, even[l + 3] = other + 1;
    odd[l] = l + 2, odd[l + 1] = l + 3, odd[l + 2] = other + 2, odd[l + 3] = other + 3;
  }
  const Vec a = __builtin_shuffle(x[0], x[1], low), b = __builtin_shuffle(x[2], x[3], low);
  const Vec c = __builtin_shuffle(x[0], x[1], high), d = __builtin_shuffle(x[2], x[3], high);
  x[0] = __builtin_shuffle(a, b, even);
  x[1] = __builtin_shuffle(a, b, odd);
  x[2] = __builtin_shuffle(c, d, even);
  x[3] = __builtin_shuffle(c, d, odd);
}

// to[columns, kPanel]: column c of token i, times its factor; lanes behind `count` up to a whole vector are 0.
static inline void Transpose(Rows from, int64_t count, int64_t columns, const Factor& factor, float* to) {
  for (int64_t lane = 0; lane < count; lane += kLanes) {
    const float* rows[kLanes];  // pointers after the last one are read, too, and not used
    for (int64_t l = 0; l < kLanes; ++l) rows[l] = from.data + Lesser(lane + l, count - 1) * from.stride;
    const Vec factors = LanesOf(factor, lane, count);
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4) {
      Vec x[4];
      for (int r = 0; r < 4; ++r) x[r] = JoinQuads(rows + r, c);
      TransposeQuads(x);
      for (int r = 0; r < 4; ++r) Store(to + (c + r) * kPanel + lane, factors * x[r]);
    }
    for (; c < columns; ++c) {
      float x[kLanes];
      for (int64_t l = 0; l < kLanes; ++l) x[l] = rows[l][c];
      Store(to + c * kPanel + lane, factors * Load(x));
    }
  }
}

// to[i * stride + c] = factor of i * from[c, i], from[columns, kPanel].
static inline void TransposeBack(const float* from, int64_t count, int64_t columns, const Factor& factor, float* to,
                                 int64_t stride) {
  for (int64_t lane = 0; lane < count; lane += kLanes) {
    const Vec factors = LanesOf(factor, lane, count);
    const int64_t rows = Lesser(count - lane, kLanes);
    float* row = to + lane * stride;
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4) {
      Vec x[4];
      for (int r = 0; r < 4; ++r) x[r] = factors * Load(from + (c + r) * kPanel + lane);
      TransposeQuads(x);
      if (rows == kLanes) {
        for (int r = 0; r < 4; ++r) SplitQuads(x[r], row + r * stride + c, 4 * stride);
        continue;
      }
      float quads[4][kLanes];
      for (int r = 0; r < 4; ++r) Store(quads[r], x[r]);
      for (int64_t i = 0; i < rows; ++i) __builtin_memcpy(row + i * stride + c, quads[i % 4] + i / 4 * 4, 16);
    }
    for (; c < columns; ++c) {
      for (int64_t i = 0; i < rows; ++i) row[i * stride + c] = factor.Of(lane + i) * from[c * kPanel + lane + i];
    }
  }
}

// to[kPanel, width]: the rows, times their factors, zeros behind their columns; rows behind `count` up to a whole
// vector of lanes are 0.
static inline void Pad(Rows from, int64_t count, int64_t columns, int64_t width, const Factor& factor, float* to) {
  const int64_t lanes = RoundUp(count, kLanes);
  for (int64_t i = 0; i < lanes; ++i, to += width) {
    if (i >= count) {
      Zero(to, width);
      continue;
    }
    const float f = factor.Of(i);
    const float* row = from.data + i * from.stride;
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) Store(to + c, f * Load(row + c));
    for (; c < columns; ++c) to[c] = f * row[c];
    for (; c < width; ++c) to[c] = 0.0f;
  }
}

static inline void Unpad(const float* from, int64_t count, int64_t columns, int64_t width, float* to, int64_t stride) {
  for (int64_t i = 0; i < count; ++i) CopyRow(from + i * width, columns, to + i * stride);
}
