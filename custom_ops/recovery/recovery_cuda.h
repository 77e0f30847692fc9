// Recovery on a GPU: the gather, its deterministic gradient, and the pooled forms of both.
//
// Contracts as in recovery.h, with two differences:
//   - Without bags, an index out of range is not reported, because a report would wait for the device. It reads zeros and
//     adds to no row, as in TensorFlow's own gather on a GPU.
//   - The sum of a row in more than one chunk (below) is rounded in another order than on a CPU, the same on every run.
//
// # Bags
// bag_splits have the size of a batch and are on the device. The kernels follow them without a check of bounds. So another
// kernel checks splits and index first, and the host waits for its answer. The device idles from the end of that kernel
// until the next launch. Splits in host memory would need no kernel. But the host would loop over them, and the copy of
// pageable memory would wait for the stream as well.
//
// # The gradient
// A stable sort (common/sort.cuh) orders the positions by row. The sorted positions
// are cut into chunks of kChunk. A row within one chunk is summed in the order of its positions. A row that goes on in the
// next chunk leaves a partial sum per chunk; these are added in order afterwards. So the work of a chunk does not
// depend on how often a row is used. Many blocks share an id that half of the batch names.
#pragma once

#include "common/cuda_api.h"

// rows: bytes of [num_rows, row_bytes]; out: bytes of [out_rows, row_bytes], out_rows >= num_index; the rest become 0.
FUSEDREC_CUDA_API int fusedrec_recover(const void* rows, int64_t num_rows, int64_t row_bytes, const int32_t* index,
                                       int64_t num_index, void* out, int64_t out_rows, void* stream);

// type: 0 float, 1 half, 2 bfloat16. out[g] = bag_scale[g] * sum of rows[index[n]] over the bag; rows of `out` from num_bags
// up to out_rows become 0. The rows lie in parts [num_parts], host, of device arrays [part_rows[i], dim], and have one
// numbering, one array after another. bag_splits (device, [num_bags + 1]) that do not run from 0 to num_index without
// decreasing, or an index that is out of range: kCudaInvalidValue. Waits once.
FUSEDREC_CUDA_API int fusedrec_pooled_recover(int type, const void* const* parts, const int64_t* part_rows,
    int64_t num_parts, int64_t dim, const int32_t* index, int64_t num_index, const int64_t* bag_splits,
    const float* bag_scale, int64_t num_bags, const FusedrecAllocator* memory, void* out, int64_t out_rows,
    void* stream);

// out[u] = sum of grads[n] over the n with index[n] == u, u < num_rows; rows up to out_rows become 0. With bag_splits and
// bag_scale, the gradient of fusedrec_pooled_recover, which refuses what that refuses, and waits once: grads has a row
// per bag. Without: null, null, 0.
FUSEDREC_CUDA_API int fusedrec_recover_grad(int type, const void* grads, int64_t dim, const int32_t* index,
    int64_t num_index, const int64_t* bag_splits, const float* bag_scale, int64_t num_bags,
    const FusedrecAllocator* memory, void* out, int64_t num_rows, int64_t out_rows, void* stream);
