// Joining and splitting of messages on a GPU: entries stay on the device, splits and lengths are in host memory.
//
// Contracts and results equal join_messages.h's, bit for bit. One launch copies all blocks (common/pieces.cuh). The
// lengths of received blocks are in their headers only. One warp per source reads them, one lookup after the other,
// because the header of a lookup begins where the ids of the previous lookup end.
#pragma once

#include "common/cuda_api.h"

// messages [L], host, of arrays on the device; splits [L] of arrays [R], host, checked by the caller; joined
// [joined_size >= sum of all blocks], device, out: entries after the last block become 0.
FUSEDREC_CUDA_API int fusedrec_join_messages(const int64_t* const* messages, const int32_t* const* splits,
    int64_t num_messages, int64_t num_ranks, const FusedrecAllocator* memory, int64_t* joined, int64_t joined_size,
    void* stream);

// message [sum of splits], device; splits [R], checked by the caller, and segments [L], host; lengths [L * R], host, out:
// entries of the block of rank r in lookup i, at i * R + r. Waits once, for the lengths. A header that does not agree with
// its block: kCudaInvalidValue.
FUSEDREC_CUDA_API int fusedrec_message_lengths(const int64_t* message, const int32_t* splits, const int64_t* segments,
    int64_t num_messages, int64_t num_ranks, const FusedrecAllocator* memory, int32_t* lengths, void* stream);

// lengths: host, the result of fusedrec_message_lengths. parts [L]: host, of arrays on the device, out.
FUSEDREC_CUDA_API int fusedrec_split_messages(const int64_t* message, const int32_t* lengths, int64_t num_messages,
    int64_t num_ranks, const FusedrecAllocator* memory, int64_t* const* parts, void* stream);
