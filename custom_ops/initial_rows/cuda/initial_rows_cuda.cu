#include "initial_rows/cuda/initial_rows_cuda.h"

#include <vector>

#include "common/launcher.cuh"
#include "initial_rows/cuda/initial_rows_cuda.cuh"

namespace fusedrec {
namespace initial_rows {
namespace {

constexpr int64_t kMost = (int64_t{1} << 31) - 1;

template <typename T>
int Draw(const void* rows, const uint8_t* exists, const int64_t* ids, const TablePiece* tables, int64_t num_tables,
         int64_t num_ids, int64_t dim, const Values& values, void* out, void* stream) {
  FUSEDREC_LAUNCH(InitialRowsKernel<T>, LoopBlocks(num_ids * ((dim + 3) / 4), kPieceThreads), kPieceThreads, 0, stream,
                  static_cast<const T*>(rows), exists, ids, tables, num_tables, num_ids, dim, values,
                  static_cast<T*>(out));
  return LastError();
}

}  // namespace
}  // namespace initial_rows
}  // namespace fusedrec

using namespace fusedrec;                // NOLINT
using namespace fusedrec::initial_rows;  // NOLINT

int64_t fusedrec_initial_rows_scratch_bytes(int64_t num_segments) {
  Carver carver(nullptr);
  carver.Take<TablePiece>(num_segments);
  return carver.bytes();
}

int fusedrec_initial_rows(int type, const void* rows, const uint8_t* exists, const int64_t* ids,
                          const int64_t* segment_splits, const int64_t* seeds, int64_t num_ids, int64_t num_segments,
                          int64_t dim, int distribution, float a, float b, void* scratch, void* out, void* stream) {
  const bool sizes_fit = num_ids >= 0 && num_ids <= kMost && dim >= 0 && dim <= kMost && num_segments <= kMost;
  if (!sizes_fit || type < 0 || type > 2 || distribution < 0 || distribution > 3 ||
      !SplitsAreSound(segment_splits, num_segments, num_ids)) {
    return kCudaInvalidValue;
  }
  if (num_ids == 0 || dim == 0) return kCudaSuccess;
  std::vector<TablePiece> tables;
  for (int64_t s = 0; s < num_segments; ++s) tables.push_back({segment_splits[s], static_cast<uint64_t>(seeds[s])});
  auto* const on_device = static_cast<TablePiece*>(scratch);
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(on_device, tables.data(), num_segments, stream));
  auto* const draw = type == kNumberFloat ? &Draw<float> : type == kNumberHalf ? &Draw<Half> : &Draw<Bfloat16>;
  const Values values{static_cast<Distribution>(distribution), a, b};
  return draw(rows, exists, ids, on_device, num_segments, num_ids, dim, values, out, stream);
}
