// Gate and norm behind the attention, one token and one group of columns after another. A group stays in the first
// cache.

// The first `count` of a vector's numbers, and zeros.
static inline Vec LoadSome(const float* p, int64_t count) {
  if (count >= kLanes) return Load(p);
  float x[kLanes] = {};
  __builtin_memcpy(x, p, count * sizeof(float));
  return Load(x);
}

static inline void StoreSome(float* p, int64_t count, Vec x) {
  if (count >= kLanes) return Store(p, x);
  float numbers[kLanes];
  Store(numbers, x);
  __builtin_memcpy(p, numbers, count * sizeof(float));
}

// 0 behind the first `count` numbers.
static inline Vec KeepSome(int64_t count, Vec x) {
  if (count >= kLanes) return x;
  float numbers[kLanes];
  Store(numbers, x);
  return LoadSome(numbers, count);
}

static inline float SumOf(Vec x) {
  float numbers[kLanes], sum = 0.0f;
  Store(numbers, x);
  for (int64_t l = 0; l < kLanes; ++l) sum += numbers[l];
  return sum;
}

// A group of columns of one token.
struct GateGroup {
  GateGroup(const OutputGate& g, int64_t begin)
      : gate(g.gate + begin),
        attended(g.attended + begin),
        weight(g.weight == nullptr ? nullptr : g.weight + begin % g.columns),
        bias(g.weight == nullptr ? nullptr : g.bias + begin % g.columns),
        width(g.columns / g.groups),
        gate_first(g.gate_first) {
    Vec sum{};
    for (int64_t c = 0; c < width; c += kLanes) sum += Input(c);
    mean = SumOf(sum) / static_cast<float>(width);
    Vec squares{};
    for (int64_t c = 0; c < width; c += kLanes) {
      const Vec centred = KeepSome(width - c, Input(c) - Splat(mean));
      squares = Fma(centred, centred, squares);
    }
    inverse = 1.0f / __builtin_sqrtf(SumOf(squares) / static_cast<float>(width) + g.epsilon);
  }

  Vec Gate(int64_t c) const { return LoadSome(gate + c, width - c); }
  Vec Attended(int64_t c) const { return LoadSome(attended + c, width - c); }
  // The numbers that are normalised.
  Vec Input(int64_t c) const { return gate_first ? Gate(c) * Attended(c) : Attended(c); }
  Vec Normalized(int64_t c) const { return (Input(c) - Splat(mean)) * Splat(inverse); }
  Vec Weighted(int64_t c, Vec normalized) const {
    if (weight == nullptr) return normalized;
    return Fma(normalized, LoadSome(weight + c, width - c), LoadSome(bias + c, width - c));
  }

  const float *gate, *attended, *weight, *bias;
  int64_t width;
  bool gate_first;
  float mean, inverse;  // of the deviation
};

static void GateForward(const OutputGate& g, int64_t begin, int64_t end) {
  for (int64_t at = begin * g.columns; at < end * g.columns; at += g.columns / g.groups) {
    const GateGroup group(g, at);
    for (int64_t c = 0; c < group.width; c += kLanes) {
      const Vec y = group.Weighted(c, group.Normalized(c));
      StoreSome(g.result + at + c, group.width - c, g.gate_first ? y : y * group.Gate(c));
    }
  }
}

// With a the attention, u the gate, n the normalised numbers, w and b the weights of the norm and dy the gradient:
//   y = u (n w + b):             dn = dy u w;  da = dx;    du = dy (n w + b);  dw = sum of dy u n;  db = sum of dy u
//   y = n w + b, n of x = u a:   dn = dy w;    da = dx u;  du = dx a;          dw = sum of dy n;    db = sum of dy
//   dx = (dn - mean(dn) - n mean(dn n)) / deviation
static void GateBackward(const OutputGate& g, int64_t begin, int64_t end, float* weight_sums, float* bias_sums) {
  for (int64_t at = begin * g.columns; at < end * g.columns; at += g.columns / g.groups) {
    const GateGroup group(g, at);
    const int64_t width = group.width, column = at % g.columns;
    // The gradient behind the norm, and the gradient of the normalised numbers.
    const auto grad_of = [&](int64_t c) {
      const Vec dy = LoadSome(g.grads + at + c, width - c);
      return g.gate_first ? dy : dy * group.Gate(c);
    };
    const auto normalized_grad = [&](int64_t c) {
      return g.weight == nullptr ? grad_of(c) : grad_of(c) * LoadSome(group.weight + c, width - c);
    };
    Vec sum{}, products{};
    for (int64_t c = 0; c < width; c += kLanes) {
      const Vec dn = normalized_grad(c);
      sum += dn;
      products = Fma(dn, group.Normalized(c), products);
    }
    const Vec mean = Splat(SumOf(sum) / static_cast<float>(width));
    const Vec projection = Splat(SumOf(products) / static_cast<float>(width));
    for (int64_t c = 0; c < width; c += kLanes) {
      const int64_t count = width - c;
      const Vec n = group.Normalized(c), behind = grad_of(c);
      const Vec dx = (normalized_grad(c) - mean - n * projection) * Splat(group.inverse);
      const Vec du = g.gate_first ? dx * group.Attended(c)
                                  : LoadSome(g.grads + at + c, count) * group.Weighted(c, n);
      if (g.weight != nullptr) {
        float *of_weight = weight_sums + column + c, *of_bias = bias_sums + column + c;
        StoreSome(of_weight, count, LoadSome(of_weight, count) + behind * n);
        StoreSome(of_bias, count, LoadSome(of_bias, count) + behind);
      }
      StoreSome(g.attended_grads + at + c, count, g.gate_first ? dx * group.Gate(c) : dx);
      StoreSome(g.gate_grads + at + c, count, du);
    }
  }
}
