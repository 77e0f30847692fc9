// Small matrix products. One kernel serves all products of the attention. Its left operand is read number by number
// with any strides (keys and values as they lie in their tensors, or tiles). Its right operand and its result are
// vectors (panels of queries as columns, or rows of padded length).

// c[kRows, kVectors * kLanes] (+)= a b, the sum over `depth`, in registers. Row m, column k of a is
// a[m * a_row + k * a_col].
template <int kRows, int kVectors, bool kAdd>
static inline __attribute__((always_inline)) void Block(int64_t depth, const float* a, int64_t a_row, int64_t a_col,
                                                        const float* b, int64_t b_row, float* c, int64_t c_row) {
  Vec sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) sum[m][n] = kAdd ? Load(c + m * c_row + n * kLanes) : Vec{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec right[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) right[n] = Load(b + k * b_row + n * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Vec left = Splat(a[m * a_row + k * a_col]);
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) sum[m][n] = Fma(left, right[n], sum[m][n]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) Store(c + m * c_row + n * kLanes, sum[m][n]);
  }
}

// How a product is to be done, known to the compiler: kTransposed: a is stored [depth, rows], else [rows, depth].
template <bool kTransposed, bool kAdd>
struct Product {
  int64_t rows, depth;
  const float* a;
  int64_t stride;  // of the rows that a is stored in

  // One column of blocks.
  template <int kVectors>
  void Column(const float* b, int64_t b_row, float* c, int64_t c_row) const {
    int64_t m = 0;
    for (; m + kBlockRows <= rows; m += kBlockRows) Rows<kBlockRows, kVectors>(m, b, b_row, c, c_row);
    switch (rows - m) {
#define FUSEDREC_REMAINDER(n) \
  case n: Rows<(n < kBlockRows ? n : 1), kVectors>(m, b, b_row, c, c_row); break;
      FUSEDREC_REMAINDER(1)
      FUSEDREC_REMAINDER(2)
      FUSEDREC_REMAINDER(3)
      FUSEDREC_REMAINDER(4)
      FUSEDREC_REMAINDER(5)
      FUSEDREC_REMAINDER(6)
      FUSEDREC_REMAINDER(7)
#undef FUSEDREC_REMAINDER
      default: break;
    }
    static_assert(kBlockRows <= 8, "one case for each remainder");
  }

 private:
  template <int kRows, int kVectors>
  void Rows(int64_t m, const float* b, int64_t b_row, float* c, int64_t c_row) const {
    const int64_t a_row = kTransposed ? 1 : stride, a_col = kTransposed ? stride : 1;
    Block<kRows, kVectors, kAdd>(depth, a + m * a_row, a_row, a_col, b, b_row, c + m * c_row, c_row);
  }
};

// c[rows, columns] (+)= a b. Columns are a multiple of kLanes; `stride` belongs to the rows that hold a.
template <bool kTransposed, bool kAdd>
static void Multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t stride, const float* b,
                     int64_t b_row, float* c, int64_t c_row) {
  const Product<kTransposed, kAdd> product = {rows, depth, a, stride};
  int64_t n = 0;
  for (; n + kBlockVectors * kLanes <= columns; n += kBlockVectors * kLanes) {
    product.template Column<kBlockVectors>(b + n, b_row, c + n, c_row);
  }
  switch ((columns - n) / kLanes) {
    case 1: product.template Column<1>(b + n, b_row, c + n, c_row); break;
    case 2: product.template Column<(2 < kBlockVectors ? 2 : 1)>(b + n, b_row, c + n, c_row); break;
    case 3: product.template Column<(3 < kBlockVectors ? 3 : 1)>(b + n, b_row, c + n, c_row); break;
    default: break;
  }
  static_assert(kBlockVectors <= 4, "one case for each remainder");
}
