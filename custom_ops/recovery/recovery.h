// Rows back to where they are used, and their gradients back to where they came from.
//
// Source: FusedRec, section 3, "Embedding Recovery": one gather with the composed index restore[inverse[n]] instead of
// two with a copy between them. The gradient is its transpose: rows that were used several times get the sum.
//
// # Determinism
// RecoverGrad sums the gradients of a row in the order of n, whatever the number of threads. Positions are first sorted
// by row (a stable counting sort), then every row belongs to one thread. 16-bit rows are summed in float32 and rounded
// once.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "common/parallel.h"

namespace fusedrec {

// First entry of `index` that is not in [0, rows), or -1.
int64_t FirstOutOfRange(absl::Span<const int32_t> index, int64_t rows);

// out[n, :] = rows[index[n], :] for n < N; Rows of `out` after N become 0.
//
//   rows   bytes of [P, D]
//   index  [N], each in [0, P) (caller checks)
//   out    bytes of [>= N, D]
void Recover(const char* rows, int64_t row_bytes, absl::Span<const int32_t> index, const ParallelFor& parallel_for,
             char* out, int64_t out_rows);

// out[u, :] = sum of grads[n, :] over n with index[n] == u, in the order of n. Rows never named become 0.
// T is float, Eigen::half or Eigen::bfloat16.
//
//   grads  [>= N, D]
//   index  [N], each in [0, out_rows) (caller checks)
//   begin  [out_rows + 2], scratch: the caller can refuse a number of rows that memory does not hold
//   out    [out_rows, D]
template <typename T>
void RecoverGrad(const T* grads, int64_t dim, absl::Span<const int32_t> index, const ParallelFor& parallel_for,
                 int32_t* begin, T* out, int64_t out_rows);

}  // namespace fusedrec
