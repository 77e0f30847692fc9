// Segment unique on a GPU: all segments in one set of launches, in order of first occurrence.
//
// segment_unique.h has the contract. The result equals the CPU's, bit for bit.
//
// # How
// Three launches and one fill of scratch, whatever the number of segments:
//   1. Insert. An open-addressing table of positions has 4-byte slots. A segment has twice as many slots as ids, side by
//      side. A compare-and-swap claims a slot for one id. An atomicMin leaves the smallest position of that id in it, so
//      the result does not depend on the order of threads. A thread has four ids under way at once, because each id is a
//      chain of two random reads.
//   2. Number. A position that stands in its own slot is a first occurrence. Ballots count them inside a warp and a
//      look-back across tiles, so threads contend for no counter. The pass writes the unique ids, and for every position
//      the number of first occurrences before it.
//   3. Inverse. inverse[n] is the number of n's first occurrence. The same numbers give the bounds of the segments.
#pragma once

#include "common/cuda_api.h"

// The splits are in host memory, all else on the device. Waits once, for unique_splits: U is the size of an output.
FUSEDREC_CUDA_API int fusedrec_segment_unique(const int64_t* ids, const int64_t* segment_splits, int64_t num_ids,
    int64_t num_segments, const FusedrecAllocator* memory, int64_t* unique_ids, int64_t* unique_splits,
    int32_t* inverse, void* stream);
