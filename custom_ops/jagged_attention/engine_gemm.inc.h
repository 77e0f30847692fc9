// Small matrix products. One kernel serves all products of the attention: its left operand is read number by number
// with any strides (keys and values as they lie in their tensors, or tiles), its right operand and its result by
// vectors (panels of queries as columns, or rows of padded length).

// c[kRows, kVectors * kLanes] (+)= a b, the sum over `depth`. Row m, column k of a is a[m * a_row + k * a_col].
template <int kRows, int kVectors>
static inline __attribute__((always_inline)) void Block(int64_t depth, const float* a, int64_t a_row, int64_t a_col,
                                                        const float* b, int64_t b_row, float* c, int64_t c_row,
                                                        bool add) {
  Vec sum[kRows][kVectors];
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kVectors; ++n) sum[m][n] = add ? Load(c + m * c_row + n * kLanes) : Vec{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec right[kVectors];
    for (int n = 0; n < kVectors; ++n) right[n] = Load(b + k * b_row + n * kLanes);
    for (int m = 0; m < kRows; ++m) {
      const Vec left = Splat(a[m * a_row + k * a_col]);
      for (int n = 0; n < kVectors; ++n) sum[m][n] = Fma(left, right[n], sum[m][n]);
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kVectors; ++n) Store(c + m * c_row + n * kLanes, sum[m][n]);
  }
}

// One column of blocks. The stride that is 1 is made known to the compiler.
template <int kVectors, bool kTransposed>
static void Column(int64_t rows, int64_t depth, const float* a, int64_t stride, const float* b, int64_t b_row,
                   float* c, int64_t c_row, bool add) {
  const int64_t a_row = kTransposed ? 1 : stride, a_col = kTransposed ? stride : 1;
  int64_t m = 0;
  for (; m + kBlockRows <= rows; m += kBlockRows) {
    Block<kBlockRows, kVectors>(depth, a + m * a_row, a_row, a_col, b, b_row, c + m * c_row, c_row, add);
  }
  a += m * a_row;
  c += m * c_row;
  switch (rows - m) {
#define FUSEDREC_REMAINDER(n) \
  case n: Block<(n < kBlockRows ? n : 1), kVectors>(depth, a, a_row, a_col, b, b_row, c, c_row, add); break;
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

// c[rows, columns] (+)= a b. Columns are a multiple of kLanes. kTransposed: a is stored [depth, rows] with rows of
// `stride` numbers, else [rows, depth].
template <bool kTransposed>
static void Multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t stride, const float* b,
                     int64_t b_row, float* c, int64_t c_row, bool add) {
  int64_t n = 0;
  for (; n + 2 * kLanes <= columns; n += 2 * kLanes) {
    Column<2, kTransposed>(rows, depth, a, stride, b + n, b_row, c + n, c_row, add);
  }
  if (n < columns) Column<1, kTransposed>(rows, depth, a, stride, b + n, b_row, c + n, c_row, add);
}
