// Segment unique on a GPU: all segments in one set of launches, in order of first occurrence.
//
// The contract is that of segment_unique.h, with the same result as the CPU's, bit for bit.
//
// # How
// Three launches and one fill of scratch, whatever the number of segments:
//   1. Insert. An open-addressing table of positions: 4-byte slots, the slots of a segment are twice its ids, side by
//      side. A slot is claimed with a compare-and-swap and from then on belongs to one id; the smallest position of that
//      id settles in it (atomicMin), so what is left does not depend on the order of threads. Four ids per thread are
//      under way at once, because each is a chain of two random reads.
//   2. Number. Who stands in his slot is a first occurrence. Ballots count them inside a warp, a look-back across tiles:
//      no counter that threads contend for. Writes unique ids, and for every position the firsts before it.
//   3. Inverse. inverse[n] = number of n's first; bounds of segments are read from the same numbers.
#ifndef FUSEDREC_SEGMENT_UNIQUE_CUDA_SEGMENT_UNIQUE_CUDA_H_
#define FUSEDREC_SEGMENT_UNIQUE_CUDA_SEGMENT_UNIQUE_CUDA_H_

#include "common/cuda_api.h"

namespace fusedrec {

constexpr int64_t kSegmentUniqueCudaMaxIds = (int64_t{1} << 31) - 1;  // positions and slots are 32-bit
constexpr int64_t kSegmentUniqueCudaMaxSegments = int64_t{1} << 20;

}  // namespace fusedrec

FUSEDREC_CUDA_API int64_t fusedrec_segment_unique_scratch_bytes(int64_t num_ids, int64_t num_segments);

// Enqueues everything; waits for nothing.
//
//   ids            [N]    device
//   segment_splits [S+1]  host; from 0 to N without decreasing, else cudaErrorInvalidValue
//   scratch        device, aligned to 256 bytes
//   unique_ids     [N]    device, out: the first U are written
//   unique_splits  [S+1]  device, out; the last one is U
//   inverse        [N]    device, out
FUSEDREC_CUDA_API int fusedrec_segment_unique(const int64_t* ids, const int64_t* segment_splits, int64_t num_ids,
                                              int64_t num_segments, void* scratch, int64_t* unique_ids,
                                              int64_t* unique_splits, int32_t* inverse, void* stream);

#endif  // FUSEDREC_SEGMENT_UNIQUE_CUDA_SEGMENT_UNIQUE_CUDA_H_
