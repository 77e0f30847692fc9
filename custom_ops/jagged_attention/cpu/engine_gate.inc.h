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
  GateGroup(const AttentionProblem& p, int64_t begin)
      : gate(p.gate + begin), attended(p.out + begin),
        weight(p.norm_weight == nullptr ? nullptr : p.norm_weight + begin % (p.heads * p.value_dim)),
        bias(p.norm_weight == nullptr ? nullptr : p.norm_bias + begin % (p.heads * p.value_dim)),
        width(p.per_head ? p.value_dim : p.heads * p.value_dim), gate_first(p.gate_first) {
    Vec sum{};
    for (int64_t c = 0; c < width; c += kLanes) sum += Input(c);
    mean = SumOf(sum) / static_cast<float>(width);
    Vec squares{};
    for (int64_t c = 0; c < width; c += kLanes) {
      const Vec centred = KeepSome(width - c, Input(c) - Splat(mean));
      squares = Fma(centred, centred, squares);
    }
    inverse = 1.0f / __builtin_sqrtf(SumOf(squares) / static_cast<float>(width) + p.epsilon);
  }

  Vec Gate(int64_t c) const { return LoadSome(gate + c, width - c); }
  Vec Attended(int64_t c) const { return LoadSome(attended + c, width - c); }
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

static void GateForward(const AttentionProblem& p, int64_t begin, int64_t end) {
  const int64_t columns = p.heads * p.value_dim;
  for (int64_t at = begin * columns, width; at < end * columns; at += width) {
    const GateGroup group(p, at);
    width = group.width;
    for (int64_t c = 0; c < group.width; c += kLanes) {
      const Vec y = group.Weighted(c, group.Normalized(c));
      StoreSome(p.gated + at + c, group.width - c, p.gate_first ? y : y * group.Gate(c));
    }
  }
}

// With a the attention, u the gate, n the normalised numbers, w and b the weights of the norm and dy the gradient:
//   y = u (n w + b):             dn = dy u w;  da = dx;    du = dy (n w + b);  dw = sum of dy u n;  db = sum of dy u
//   y = n w + b, n of x = u a:   dn = dy w;    da = dx u;  du = dx a;          dw = sum of dy n;    db = sum of dy
//   dx = (dn - mean(dn) - n mean(dn n)) / deviation
static void GateBackward(const AttentionProblem& p, int64_t begin, int64_t end, float* weight_sums, float* bias_sums) {
  const int64_t columns = p.heads * p.value_dim;
  for (int64_t at = begin * columns, width; at < end * columns; at += width) {
    const GateGroup group(p, at);
    const int64_t column = at % columns;
    width = group.width;
    // The gradient behind the norm, and the gradient of the normalised numbers.
    const auto grad_of = [&](int64_t c) {
      const Vec dy = LoadSome(p.grads + at + c, width - c);
      return p.gate_first ? dy : dy * group.Gate(c);
    };
    const auto normalized_grad = [&](int64_t c) {
      return p.norm_weight == nullptr ? grad_of(c) : grad_of(c) * LoadSome(group.weight + c, width - c);
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
      const Vec du = p.gate_first ? dx * group.Attended(c) : LoadSome(p.grads + at + c, count) * group.Weighted(c, n);
      if (p.norm_weight != nullptr) {
        float *of_weight = weight_sums + column + c, *of_bias = bias_sums + column + c;
        StoreSome(of_weight, count, LoadSome(of_weight, count) + behind * n);
        StoreSome(of_bias, count, LoadSome(of_bias, count) + behind);
      }
      StoreSome(p.attended_grads + at + c, count, p.gate_first ? dx * group.Gate(c) : dx);
      StoreSome(p.gate_grads + at + c, count, du);
    }
  }
}
