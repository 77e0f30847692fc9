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

// to[columns, kPanel]: column c of token i, times factors[i] (at factor_stride) and `factor`; lanes behind `count` up
// to a whole vector are 0.
static inline void Transpose(Rows from, int64_t count, int64_t columns, float factor, const float* factors,
                             int64_t factor_stride, float* to) {
  const int64_t lanes = RoundUp(count, kLanes);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    if (lane >= count) {
      for (int64_t c = 0; c < columns; ++c) to[c * kPanel + lane] = 0.0f;
      continue;
    }
    const float f = factors == nullptr ? factor : factor * factors[lane * factor_stride];
    const float* row = from.data + lane * from.stride;
    for (int64_t c = 0; c < columns; ++c) to[c * kPanel + lane] = f * row[c];
  }
}

// to[kPanel, width]: the rows, times the same factors, zeros behind their columns; rows behind `count` up to a whole
// vector of lanes are 0.
static inline void Pad(Rows from, int64_t count, int64_t columns, int64_t width, float factor, const float* factors,
                       int64_t factor_stride, float* to) {
  const int64_t lanes = RoundUp(count, kLanes);
  for (int64_t lane = 0; lane < lanes; ++lane, to += width) {
    if (lane >= count) {
      Zero(to, width);
      continue;
    }
    const float f = factors == nullptr ? factor : factor * factors[lane * factor_stride];
    const float* row = from.data + lane * from.stride;
    for (int64_t c = 0; c < columns; ++c) to[c] = f * row[c];
    for (int64_t c = columns; c < width; ++c) to[c] = 0.0f;
  }
}

// to[i * stride + c] = factor * factors[i] * from[c, i], from[columns, kPanel].
static inline void TransposeBack(const float* from, int64_t count, int64_t columns, float factor, const float* factors,
                                 int64_t factor_stride, float* to, int64_t stride) {
  for (int64_t lane = 0; lane < count; ++lane) {
    const float f = factors == nullptr ? factor : factor * factors[lane * factor_stride];
    float* row = to + lane * stride;
    for (int64_t c = 0; c < columns; ++c) row[c] = f * from[c * kPanel + lane];
  }
}

// Drops the padding of rows again.
static inline void Unpad(const float* from, int64_t count, int64_t columns, int64_t width, float* to, int64_t stride) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < columns; ++c) to[i * stride + c] = from[i * width + c];
  }
}
