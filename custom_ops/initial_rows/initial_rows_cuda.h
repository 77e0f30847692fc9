// Initial rows on a GPU, by the numbers of initial_number.h: the bits of the CPU.
//
// A thread draws the four columns that one call of the generator gives.
#pragma once

#include "common/cuda_api.h"

// type: of rows: 0 float, 1 half, 2 bfloat16. rows, out [W, D], exists (0 or 1) and ids [W]: device; out may be rows.
// segment_splits [S + 1], checked by the caller, and seeds [S]: host. distribution: 0 constant, 1 uniform, 2 normal,
// 3 truncated normal.
FUSEDREC_CUDA_API int fusedrec_initial_rows(int type, const void* rows, const uint8_t* exists, const int64_t* ids,
    const int64_t* segment_splits, const int64_t* seeds, int64_t num_ids, int64_t num_segments, int64_t dim,
    int distribution, float a, float b, const FusedrecAllocator* memory, void* out, void* stream);
