// Recovery on a GPU: the gather, its deterministic gradient, and the pooled forms of both.
//
// Contracts are those of recovery.h and pooled.h, with two differences. Without bags, an index that is out of range is not
// reported, which would need a wait for the device: as in TensorFlow's own gather on a GPU, it reads zeros, and adds to no
// row. And the sum of a row that is used in more than one chunk (below) is rounded in another order than on a CPU, the
// same on every run.
//
// # Bags
// bag_splits have the size of a batch and are on the device. They are followed without a bound, so a kernel looks at them
// first, and at the index while it is there; one number comes to the host, which waits for it. That is the price of
// refusing them: the device idles from the end of that kernel until the work is launched. Splits in host memory would
// need no kernel, but a loop over them on the host and, being pageable, a copy that waits for the stream as well.
//
// # The gradient
// Positions are sorted by row, stably: eight bits of the row at a time (common/stable_split.cuh). The sorted positions
// are cut into chunks of kChunk. A row that lies within one chunk is summed in the order of its positions and written; of
// a row that goes on in the next chunk, the parts are kept and added up in order afterwards. So the work of a chunk does
// not grow with how often a row is used: an id that half of the batch names is shared by many blocks.
#ifndef FUSEDREC_RECOVERY_CUDA_RECOVERY_CUDA_H_
#define FUSEDREC_RECOVERY_CUDA_RECOVERY_CUDA_H_

#include "common/cuda_api.h"

// rows: bytes of [num_rows, row_bytes]; out: bytes of [out_rows, row_bytes], out_rows >= num_index; the rest become 0.
FUSEDREC_CUDA_API int fusedrec_recover(const void* rows, int64_t num_rows, int64_t row_bytes, const int32_t* index,
                                       int64_t num_index, void* out, int64_t out_rows, void* stream);

FUSEDREC_CUDA_API int64_t fusedrec_pooled_recover_scratch_bytes();

// type: 0 float, 1 half, 2 bfloat16. out[g] = bag_scale[g] * sum of rows[index[n]] over the bag. bag_splits (device,
// [num_bags + 1]) that do not run from 0 to num_index without decreasing, or an index that is out of range:
// kCudaInvalidValue. Waits once.
FUSEDREC_CUDA_API int fusedrec_pooled_recover(int type, const void* rows, int64_t num_rows, int64_t dim,
                                              const int32_t* index, int64_t num_index, const int64_t* bag_splits,
                                              const float* bag_scale, int64_t num_bags, void* scratch, void* out,
                                              void* stream);

FUSEDREC_CUDA_API int64_t fusedrec_recover_grad_scratch_bytes(int64_t num_index, int64_t dim);

// out[u] = sum of grads[n] over the n with index[n] == u, u < num_rows; rows up to out_rows become 0. With bag_splits and
// bag_scale, the gradient of fusedrec_pooled_recover, which refuses what that refuses, and waits once: grads has a row
// per bag. Without: null, null, 0.
FUSEDREC_CUDA_API int fusedrec_recover_grad(int type, const void* grads, int64_t dim, const int32_t* index,
                                            int64_t num_index, const int64_t* bag_splits, const float* bag_scale,
                                            int64_t num_bags, void* scratch, void* out, int64_t num_rows,
                                            int64_t out_rows, void* stream);

#endif  // FUSEDREC_RECOVERY_CUDA_RECOVERY_CUDA_H_
