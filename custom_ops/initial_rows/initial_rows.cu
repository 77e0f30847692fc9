#include "initial_rows/initial_rows_cuda.h"

#include "common/launcher.cuh"
#include "common/number.cuh"
#include "common/pieces.cuh"
#include "initial_rows/initial_number.h"

namespace fusedrec::initial_rows {

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
FUSEDREC_KERNEL InitialRowsKernel(const T* rows, const uint8_t* __restrict__ exists, const int64_t* __restrict__ ids,
    const TablePiece* __restrict__ tables, int64_t num_tables, int64_t num_ids, int64_t dim, Values values, T* out) {
  const int64_t blocks = (dim + 3) / 4;
  for (int64_t i = GlobalThread(); i < num_ids * blocks; i += GridThreads()) {
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

}  // namespace fusedrec::initial_rows

#ifndef __CUDACC_RTC__
using namespace fusedrec;                // NOLINT
using namespace fusedrec::initial_rows;  // NOLINT

template <typename T>
static int Draw(const void* rows, const uint8_t* exists, const int64_t* ids, const TablePiece* tables,
                int64_t num_tables, int64_t num_ids, int64_t dim, const Values& values, void* out, void* stream) {
  FUSEDREC_LOOP(InitialRowsKernel<T>, num_ids * ((dim + 3) / 4), stream, static_cast<const T*>(rows), exists, ids,
                tables, num_tables, num_ids, dim, values, static_cast<T*>(out));
  return LastError();
}

int fusedrec_initial_rows(int type, const void* rows, const uint8_t* exists, const int64_t* ids,
    const int64_t* segment_splits, const int64_t* seeds, int64_t num_ids, int64_t num_segments, int64_t dim,
    int distribution, float a, float b, const FusedrecAllocator* memory, void* out, void* stream) {
  if (num_ids == 0 || dim == 0) return kCudaSuccess;
  std::vector<TablePiece> tables;
  for (int64_t s = 0; s < num_segments; ++s) tables.push_back({segment_splits[s], static_cast<uint64_t>(seeds[s])});
  TablePiece* on_device;
  ScratchMemory scratch(memory);
  FUSEDREC_TRY(scratch.Take({{&on_device, num_segments}}));
  FUSEDREC_TRY(CopyToDevice(on_device, tables.data(), num_segments, stream));
  auto* const draw = type == kNumberFloat ? &Draw<float> : type == kNumberHalf ? &Draw<Half> : &Draw<Bfloat16>;
  const Values values{static_cast<Distribution>(distribution), a, b};
  return draw(rows, exists, ids, on_device, num_segments, num_ids, dim, values, out, stream);
}
#endif
