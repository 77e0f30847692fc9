// exp, log and SiLU of vectors.

static inline IntVec Bits(Vec x) { return (IntVec)x; }
static inline Vec FromBits(IntVec x) { return (Vec)x; }

// exp(x) for x in [-87, 88], clamped outside; relative error below 2e-7. x = n ln2 + r, |r| <= ln2 / 2; the polynomial
// is from Cephes' expf.
static inline Vec Exp(Vec x) {
  x = Max(Min(x, Splat(88.0f)), Splat(-87.0f));
  const Vec shift = Splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to integers, which stand in the low bits
  const Vec shifted = Fma(x, Splat(1.44269504088896341f), shift);
  const Vec n = shifted - shift;
  Vec r = Fma(n, Splat(-0.693359375f), x);
  r = Fma(n, Splat(2.12194440e-4f), r);
  Vec p = Splat(1.9875691500e-4f);
  p = Fma(p, r, Splat(1.3981999507e-3f));
  p = Fma(p, r, Splat(8.3334519073e-3f));
  p = Fma(p, r, Splat(4.1665795894e-2f));
  p = Fma(p, r, Splat(1.6666665459e-1f));
  p = Fma(p, r, Splat(5.0000001201e-1f));
  p = Fma(p, r * r, r) + Splat(1.0f);
  return FromBits(Bits(p) + (Bits(shifted) << 23));  // the bits of 1.5 * 2^23 fall out at the left
}

// ln(x) for normal x > 0; relative error below 2e-7 away from 1. The polynomial is from Cephes' logf.
static inline Vec Log(Vec x) {
  // x = m 2^e with m in [sqrt(1/2), sqrt(2))
  const IntVec offset = Bits(x) - SplatInt(0x3f3504f3);
  const IntVec e = offset >> 23;
  const Vec m = FromBits(Bits(x) - (e << 23)) - Splat(1.0f);
  const Vec n = __builtin_convertvector(e, Vec);
  const Vec square = m * m;
  Vec p = Splat(7.0376836292e-2f);
  p = Fma(p, m, Splat(-1.1514610310e-1f));
  p = Fma(p, m, Splat(1.1676998740e-1f));
  p = Fma(p, m, Splat(-1.2420140846e-1f));
  p = Fma(p, m, Splat(1.4249322787e-1f));
  p = Fma(p, m, Splat(-1.6668057665e-1f));
  p = Fma(p, m, Splat(2.0000714765e-1f));
  p = Fma(p, m, Splat(-2.4999993993e-1f));
  p = Fma(p, m, Splat(3.3333331174e-1f));
  Vec tail = p * m * square;
  tail = Fma(n, Splat(-2.12194440e-4f), tail);
  tail = Fma(Splat(-0.5f), square, tail);
  return Fma(n, Splat(0.693359375f), m + tail);
}

static inline Vec Sigmoid(Vec x) { return Reciprocal(Splat(1.0f) + Exp(-x)); }

// SiLU(x) = x s and its slope s + x s (1 - s), s = sigmoid(x).
struct SiluAt {
  explicit SiluAt(Vec x) {
    const Vec sigmoid = Sigmoid(x);
    weight = x * sigmoid;
    slope = Fma(weight, Splat(1.0f) - sigmoid, sigmoid);
  }

  Vec weight, slope;
};
