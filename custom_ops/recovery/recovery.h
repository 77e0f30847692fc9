// Rows back to where they are used, and their gradients back to where they came from.
//
// Source: FusedRec, section 3, "Embedding Recovery": one gather with the composed index restore[inverse[n]] instead of
// two with a copy between them. The gradient is its transpose.
//
// The pooled form recovers and pools in one pass: bags of ids become one row each. The single rows of a bag are never
// written to memory, which saves N * D numbers each way. A bag is a sample of a pooled feature, or a single id of another.
//
// # Determinism
// All sums run in the order of n, whatever the number of threads. For gradients, positions are first sorted by row, then
// every row belongs to one thread. 16-bit rows are summed in float32 and rounded once.
#pragma once

#include "absl/types/span.h"
#include "common/parallel.h"

namespace fusedrec {

// First entry of `index` that is not in [0, rows), or -1.
int64_t FirstOutOfRange(absl::Span<const int32_t> index, int64_t rows);

// out[n, :] = rows[index[n], :] for n < N. Rows of `out` after N become 0.
//   rows   bytes of [P, D]
//   index  [N], each in [0, P) (caller checks)
//   out    bytes of [>= N, D]
void Recover(const char* rows, int64_t row_bytes, absl::Span<const int32_t> index, const ParallelFor& parallel_for,
             char* out, int64_t out_rows);

// out[g, :] = scale[g] * sum of rows[index[n], :] over n in [bag_splits[g], bag_splits[g + 1]).
// T is float, Eigen::half or Eigen::bfloat16.
//   rows        [P, D]
//   index       [N], each in [0, P) (caller checks)
//   bag_splits  [G+1], from 0 to N without decreasing (caller checks)
//   scale       [G]
//   out         [G, D]
template <typename T>
void PooledRecover(const T* rows, int64_t dim, absl::Span<const int32_t> index, absl::Span<const int64_t> bag_splits,
                   absl::Span<const float> scale, const ParallelFor& parallel_for, T* out);

// The same for rows in several parts; rows[n] is the row of the n-th id. Rows of `out` after G become 0.
//   rows  [N] pointers to [D]
//   out   [>= G, D]
template <typename T>
void PooledRecoverParts(absl::Span<const T* const> rows, int64_t dim, absl::Span<const int64_t> bag_splits,
                        absl::Span<const float> scale, const ParallelFor& parallel_for, T* out, int64_t out_rows);

// out[u, :] = sum of scale[g] * grads[g, :] over the ids n of all bags g with index[n] == u, in the order of n. Rows
// never named become 0.
//   grads       [G, D]
//   bag_splits  empty, as is scale: each id is a bag, of scale 1, and grads is [>= N, D]
//   begin       [out_rows + 2], scratch: the caller can refuse a number of rows that memory does not hold
//   out         [out_rows, D]; each index in [0, out_rows)
template <typename T>
void PooledRecoverGrad(const T* grads, int64_t dim, absl::Span<const int32_t> index,
                       absl::Span<const int64_t> bag_splits, absl::Span<const float> scale,
                       const ParallelFor& parallel_for, int32_t* begin, T* out, int64_t out_rows);

}  // namespace fusedrec
