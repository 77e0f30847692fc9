#include "recovery/recovery.h"

#include <cstring>
#include <type_traits>
#include <vector>

#include "common/counting_sort.h"
#include "common/simd.h"
#include "unsupported/Eigen/CXX11/Tensor"

namespace fusedrec {
namespace {

constexpr int64_t kAhead = 8, kAheadOfSum = 12;  // rows between a fetch and its use
constexpr int64_t kCacheLine = 64;

template <typename T>
inline void FetchRow(const T* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += kCacheLine / sizeof(T)) __builtin_prefetch(row + d);
}

// kBytes > 0 fixes the size of a row, so that a copy is a few vector moves instead of a call; 0 takes any size.
template <int64_t kBytes>
void CopyRows(const char* rows, int64_t row_bytes, const int32_t* index, int64_t begin, int64_t end, char* out) {
  const int64_t bytes = kBytes > 0 ? kBytes : row_bytes;
  for (int64_t n = begin; n < end; ++n) {
    if (n + kAhead < end) FetchRow(rows + int64_t{index[n + kAhead]} * bytes, bytes);
    std::memcpy(out + n * bytes, rows + int64_t{index[n]} * bytes, bytes);
  }
}

using Copier = void (*)(const char*, int64_t, const int32_t*, int64_t, int64_t, char*);

Copier CopierOf(int64_t row_bytes) {
  switch (row_bytes) {
    case 16: return CopyRows<16>;
    case 32: return CopyRows<32>;
    case 64: return CopyRows<64>;
    case 128: return CopyRows<128>;
    case 256: return CopyRows<256>;
    default: return CopyRows<0>;
  }
}

// sum[:] = first ? factor * row[:] : sum[:] + factor * row[:]
template <typename T>
inline __attribute__((always_inline)) void Add(const T* __restrict__ row, float factor, bool first, int64_t dim,
                                               float* __restrict__ sum) {
  if (first) {
    for (int64_t d = 0; d < dim; ++d) sum[d] = factor * static_cast<float>(row[d]);
  } else {
    for (int64_t d = 0; d < dim; ++d) sum[d] += factor * static_cast<float>(row[d]);
  }
}

// One output row from the table rows that `place` in [begin, end) names: out = scale * sum. `wide` [dim] is scratch of
// the 16-bit types; float32 is summed where it stays.
template <typename T, typename RowOf, typename FactorOf>
inline __attribute__((always_inline)) void SumInto(int64_t begin, int64_t end, int64_t fetch_end, int64_t dim,
    const RowOf& row_of, const FactorOf& factor_of, float scale, float* wide, T* out) {
  if (begin == end) {
    std::fill(out, out + dim, static_cast<T>(0.0f));
    return;
  }
  float* sum = wide;
  if constexpr (std::is_same<T, float>::value) sum = out;
  for (int64_t n = begin; n < end; ++n) {
    if (n + kAheadOfSum < fetch_end) FetchRow(row_of(n + kAheadOfSum), dim);
    Add(row_of(n), factor_of(n), n == begin, dim, sum);
  }
  if (scale != 1.0f) {
    for (int64_t d = 0; d < dim; ++d) sum[d] *= scale;
  }
  if constexpr (!std::is_same<T, float>::value) {
    for (int64_t d = 0; d < dim; ++d) out[d] = static_cast<T>(wide[d]);
  }
}

template <typename T, typename RowOf>
inline __attribute__((always_inline)) void PoolBags(const RowOf& row_of, int64_t dim, const int64_t* splits,
                                                    const float* scale, int64_t first, int64_t last, T* out) {
  std::vector<float> wide(std::is_same<T, float>::value ? 0 : dim);
  for (int64_t g = first; g < last; ++g) {
    SumInto(splits[g], splits[g + 1], splits[last], dim, row_of, [](int64_t) { return 1.0f; }, scale[g], wide.data(),
            out + g * dim);
  }
}

// scale: of the rows of grads; null: 1 for all.
template <typename T>
inline __attribute__((always_inline)) void SumBags(const T* grads, int64_t dim, const int32_t* begin,
    const int32_t* bags, const float* scale, int64_t first, int64_t last, T* out) {
  std::vector<float> wide(std::is_same<T, float>::value ? 0 : dim);
  const auto row_of = [&](int64_t p) { return grads + int64_t{bags[p]} * dim; };
  const auto sum = [&](const auto& factor_of) {
    for (int64_t u = first; u < last; ++u) {
      SumInto(begin[u], begin[u + 1], begin[last], dim, row_of, factor_of, 1.0f, wide.data(), out + u * dim);
    }
  };
  scale == nullptr ? sum([](int64_t) { return 1.0f; }) : sum([&](int64_t p) { return scale[bags[p]]; });
}

// The float32 loops, compiled for several instruction sets.
FUSEDREC_CLONES void PoolFloats(const float* rows, int64_t dim, const int32_t* index, const int64_t* splits,
                                const float* scale, int64_t first, int64_t last, float* out) {
  PoolBags([&](int64_t n) { return rows + int64_t{index[n]} * dim; }, dim, splits, scale, first, last, out);
}
FUSEDREC_CLONES void PoolPartsOfFloats(const float* const* rows, int64_t dim, const int64_t* splits,
                                       const float* scale, int64_t first, int64_t last, float* out) {
  PoolBags([&](int64_t n) { return rows[n]; }, dim, splits, scale, first, last, out);
}
FUSEDREC_CLONES void SumFloats(const float* grads, int64_t dim, const int32_t* begin, const int32_t* bags,
                               const float* scale, int64_t first, int64_t last, float* out) {
  SumBags(grads, dim, begin, bags, scale, first, last, out);
}

// out[u, :] = sum of scale[g] * grads[g, :] over the g in bags[begin[u] .. begin[u + 1]).
template <typename T>
void SumByRow(const T* grads, int64_t dim, const int32_t* begin, const std::vector<int32_t>& bags, const float* scale,
              const ParallelFor& parallel_for, T* out, int64_t out_rows) {
  const int64_t mean = bags.size() / std::max<int64_t>(out_rows, 1) + 1;
  parallel_for(out_rows, (20 + dim / 2) * mean, [&](int64_t first, int64_t last) {
    if constexpr (std::is_same<T, float>::value) {
      SumFloats(grads, dim, begin, bags.data(), scale, first, last, out);
    } else {
      SumBags(grads, dim, begin, bags.data(), scale, first, last, out);
    }
  });
}

}  // namespace

int64_t FirstOutOfRange(absl::Span<const int32_t> index, int64_t rows) {
  // One branch-free pass for the usual answer; the search runs only after a failure.
  bool bad = false;
  for (const int32_t i : index) bad |= static_cast<uint32_t>(i) >= rows;
  if (!bad) return -1;
  return std::find_if(index.begin(), index.end(), [&](int32_t i) { return static_cast<uint32_t>(i) >= rows; }) -
         index.begin();
}

void Recover(const char* rows, int64_t row_bytes, absl::Span<const int32_t> index, const ParallelFor& parallel_for,
             char* out, int64_t out_rows) {
  const int64_t num = index.size();
  parallel_for(num, 20 + row_bytes / 4, [&](int64_t begin, int64_t end) {
    const auto copy = CopierOf(row_bytes);
    copy(rows, row_bytes, index.data(), begin, end, out);
  });
  std::fill_n(out + num * row_bytes, (out_rows - num) * row_bytes, '\0');
}

template <typename T>
void PooledRecover(const T* rows, int64_t dim, absl::Span<const int32_t> index, absl::Span<const int64_t> bag_splits,
                   absl::Span<const float> scale, const ParallelFor& parallel_for, T* out) {
  const int64_t bags = scale.size(), mean = index.size() / std::max<int64_t>(bags, 1) + 1;
  parallel_for(bags, (20 + dim / 2) * mean, [&](int64_t first, int64_t last) {
    if constexpr (std::is_same<T, float>::value) {
      PoolFloats(rows, dim, index.data(), bag_splits.data(), scale.data(), first, last, out);
    } else {
      PoolBags([&](int64_t n) { return rows + int64_t{index[n]} * dim; }, dim, bag_splits.data(), scale.data(), first,
               last, out);
    }
  });
}

template <typename T>
void PooledRecoverParts(absl::Span<const T* const> rows, int64_t dim, absl::Span<const int64_t> bag_splits,
                        absl::Span<const float> scale, const ParallelFor& parallel_for, T* out, int64_t out_rows) {
  const int64_t bags = scale.size(), mean = rows.size() / std::max<int64_t>(bags, 1) + 1;
  parallel_for(bags, (20 + dim / 2) * mean, [&](int64_t first, int64_t last) {
    if constexpr (std::is_same<T, float>::value) {
      PoolPartsOfFloats(rows.data(), dim, bag_splits.data(), scale.data(), first, last, out);
    } else {
      PoolBags([&](int64_t n) { return rows[n]; }, dim, bag_splits.data(), scale.data(), first, last, out);
    }
  });
  std::fill(out + bags * dim, out + out_rows * dim, static_cast<T>(0.0f));
}

template <typename T>
void PooledRecoverGrad(const T* grads, int64_t dim, absl::Span<const int32_t> index,
                       absl::Span<const int64_t> bag_splits, absl::Span<const float> scale,
                       const ParallelFor& parallel_for, int32_t* begin, T* out, int64_t out_rows) {
  // bags[begin[u] .. begin[u + 1]): the bag of every n with index[n] == u, in the order of n.
  std::vector<int32_t> bags(index.size());
  int32_t g = -1;
  int64_t bag_end = 0;
  CountingSort(index.size(), out_rows, [&](int64_t n) { return index[n]; }, begin, [&](int64_t n, int32_t to) {
    while (bag_end <= n) bag_end = bag_splits.empty() ? ++g + 1 : bag_splits[++g + 1];
    bags[to] = g;
  });
  SumByRow(grads, dim, begin, bags, scale.data(), parallel_for, out, out_rows);
}

#define FUSEDREC_INSTANTIATE(T)                                                                                     \
  template void PooledRecover<T>(const T*, int64_t, absl::Span<const int32_t>, absl::Span<const int64_t>,           \
                                 absl::Span<const float>, const ParallelFor&, T*);                                  \
  template void PooledRecoverParts<T>(absl::Span<const T* const>, int64_t, absl::Span<const int64_t>,               \
                                      absl::Span<const float>, const ParallelFor&, T*, int64_t);                    \
  template void PooledRecoverGrad<T>(const T*, int64_t, absl::Span<const int32_t>, absl::Span<const int64_t>,       \
                                     absl::Span<const float>, const ParallelFor&, int32_t*, T*, int64_t);
FUSEDREC_INSTANTIATE(float)
FUSEDREC_INSTANTIATE(Eigen::half)
FUSEDREC_INSTANTIATE(Eigen::bfloat16)
#undef FUSEDREC_INSTANTIATE

}  // namespace fusedrec
