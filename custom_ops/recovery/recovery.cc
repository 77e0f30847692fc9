#include "recovery/recovery.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "unsupported/Eigen/CXX11/Tensor"

namespace fusedrec {
namespace {

constexpr int64_t kAhead = 8;  // rows between a fetch and its use
constexpr int64_t kCacheLine = 64;

inline void FetchRow(const char* row, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += kCacheLine) __builtin_prefetch(row + b, 0);
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

// A row of float is added up in place; narrower types need a float32 row beside it.
template <typename T>
inline void SumRows(const T* grads, int64_t dim, const int32_t* position, const int32_t* end, float* sum) {
  std::fill(sum, sum + dim, 0.0f);
  for (; position < end; ++position) {
    const T* grad = grads + int64_t{*position} * dim;
    for (int64_t d = 0; d < dim; ++d) sum[d] += static_cast<float>(grad[d]);
  }
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
void RecoverGrad(const T* grads, int64_t dim, absl::Span<const int32_t> index, const ParallelFor& parallel_for,
                 int32_t* begin, T* out, int64_t out_rows) {
  const int64_t num = index.size();
  // positions[begin[u] .. begin[u + 1]) are the n with index[n] == u, ascending. Counts stand one place ahead while the
  // positions are placed, which turns them into the begins.
  std::fill_n(begin, out_rows + 2, 0);
  std::vector<int32_t> positions(num);
  for (const int32_t u : index) ++begin[u + 2];
  for (int64_t u = 0; u < out_rows; ++u) begin[u + 2] += begin[u + 1];
  for (int64_t n = 0; n < num; ++n) positions[begin[index[n] + 1]++] = static_cast<int32_t>(n);

  const int64_t mean_uses = num / std::max<int64_t>(out_rows, 1) + 1;
  parallel_for(out_rows, (20 + dim) * mean_uses, [&](int64_t first, int64_t last) {
    std::vector<float> wide(std::is_same<T, float>::value ? 0 : dim);
    for (int64_t u = first; u < last; ++u) {
      for (int32_t p = begin[u] + kAhead; p < begin[u + 1] + kAhead && p < begin[last]; ++p) {
        FetchRow(reinterpret_cast<const char*>(grads + int64_t{positions[p]} * dim), dim * sizeof(T));
      }
      T* row = out + u * dim;
      const int32_t* from = positions.data() + begin[u];
      const int32_t* to = positions.data() + begin[u + 1];
      if constexpr (std::is_same<T, float>::value) {
        SumRows(grads, dim, from, to, row);
      } else {
        SumRows(grads, dim, from, to, wide.data());
        for (int64_t d = 0; d < dim; ++d) row[d] = static_cast<T>(wide[d]);
      }
    }
  });
}

template void RecoverGrad<float>(const float*, int64_t, absl::Span<const int32_t>, const ParallelFor&, int32_t*, float*,
                                 int64_t);
template void RecoverGrad<Eigen::half>(const Eigen::half*, int64_t, absl::Span<const int32_t>, const ParallelFor&,
                                       int32_t*, Eigen::half*, int64_t);
template void RecoverGrad<Eigen::bfloat16>(const Eigen::bfloat16*, int64_t, absl::Span<const int32_t>,
                                           const ParallelFor&, int32_t*, Eigen::bfloat16*, int64_t);

}  // namespace fusedrec
