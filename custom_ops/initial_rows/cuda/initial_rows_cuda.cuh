// Kernel of initial_rows; the idea stands in initial_rows_cuda.h.
#pragma once

#include "common/number.cuh"
#include "common/pieces.cuh"
#include "initial_rows/initial_number.h"

namespace fusedrec {
namespace initial_rows {

// The ids of a table, among those of all.
struct TablePiece {
  int64_t begin;
  uint64_t seed;
};

struct Values {
  Distribution distribution;
  double a, b;
};

// rows and out may be one array: a thread reads nothing that another writes.
template <typename T>
__global__ void __launch_bounds__(kPieceThreads)
    InitialRowsKernel(const T* rows, const uint8_t* __restrict__ exists, const int64_t* __restrict__ ids,
                      const TablePiece* __restrict__ tables, int64_t num_tables, int64_t num_ids, int64_t dim,
                      Values values, T* out) {
  const int64_t blocks = (dim + 3) / 4;
  for (int64_t i = GlobalThread(); i < num_ids * blocks; i += static_cast<int64_t>(gridDim.x) * kPieceThreads) {
    const int64_t w = i / blocks, block = i % blocks, begin = w * dim + 4 * block;
    const int64_t columns = dim - 4 * block < 4 ? dim - 4 * block : 4;
    if (exists[w] != 0) {
      for (int64_t c = 0; rows != out && c < columns; ++c) out[begin + c] = rows[begin + c];
      continue;
    }
    const Four bits = InitialBits(PieceOf(tables, num_tables, w).seed, ids[w], static_cast<uint32_t>(block));
    for (int64_t c = 0; c < columns; ++c) {
      out[begin + c] = FromFloat<T>(InitialNumber(values.distribution, values.a, values.b, bits.number[c]));
    }
  }
}

}  // namespace initial_rows
}  // namespace fusedrec
