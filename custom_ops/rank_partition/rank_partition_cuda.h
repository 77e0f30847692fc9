// Rank partition and unpacking of messages on a GPU: ids and messages stay on the device, counts come to the host.
//
// Contracts and results equal rank_partition.h's, bit for bit: a stable sort by owner (common/sort.cuh), from which
// the headers of the message follow.
#pragma once

#include "common/cuda_api.h"

// unique_splits and counts: host. tfra_owner: 0: HashRangeOwner, 1: TfraOwner. id_bits, 1 to 64: ids must lie in
// [0, 2^id_bits); 64 admits every int64. counts [R + 1], out: ids of each owner; then the first u whose id does not fit,
// -1 without. Waits once, for the counts.
FUSEDREC_CUDA_API int fusedrec_rank_partition(const int64_t* unique_ids, const int64_t* unique_splits, int64_t num_ids,
    int64_t num_segments, int64_t num_ranks, int tfra_owner, int id_bits, const FusedrecAllocator* memory,
    int64_t* message, int64_t message_size, int32_t* counts, int32_t* restore, void* stream);

// headers [R, S], host, out: the counts at the head of each block; waits for them. received_splits: host; each at least
// S, of a sum that is the message's length (caller checks).
FUSEDREC_CUDA_API int fusedrec_message_headers(const int64_t* message, const int32_t* received_splits,
    int64_t num_segments, int64_t num_ranks, const FusedrecAllocator* memory, int64_t* headers, void* stream);

// headers: as above, checked by the caller (CheckHeader). ids [V], position [V]: device, out. segment_splits [S+1],
// id_splits [R]: host, out.
FUSEDREC_CUDA_API int fusedrec_unpack_message(const int64_t* message, const int64_t* headers, int64_t num_segments,
    int64_t num_ranks, const FusedrecAllocator* memory, int64_t* ids, int64_t* segment_splits, int32_t* position,
    int32_t* id_splits, void* stream);
