// Kernels of join_messages; the idea stands in join_messages_cuda.h.
#pragma once

#include "common/pieces.cuh"

namespace fusedrec {
namespace join_messages {

// lengths[i, r] out of the headers in the block of rank r. One warp per rank. *wrong, 0 before, becomes 1 where a header
// does not agree with its block. No entry outside the block is read, whatever the headers say.
__global__ void __launch_bounds__(32)
    MessageLengthsKernel(const int64_t* __restrict__ message, const int64_t* __restrict__ block_begin,
                         const int64_t* __restrict__ segments, int64_t num_messages, int64_t num_ranks,
                         int32_t* __restrict__ lengths, int32_t* wrong) {
  const int64_t r = blockIdx.x, end = block_begin[r + 1];
  int64_t at = block_begin[r];
  for (int64_t i = 0; i < num_messages; ++i) {
    const int64_t free = end - at - segments[i];
    bool is_sound = free >= 0;
    int64_t ids = 0;
    for (int64_t s = Lane(); is_sound && s < segments[i]; s += 32) {
      const int64_t count = message[at + s];
      is_sound = 0 <= count && count <= free;  // before it is added: a damaged header must not overflow the sum
      if (is_sound) ids += count;
    }
    ids = WarpSum(ids);
    if (!__all_sync(kFullWarp, is_sound) || ids > free) {
      if (Lane() == 0) *wrong = 1;
      return;
    }
    if (Lane() == 0) lengths[i * num_ranks + r] = static_cast<int32_t>(segments[i] + ids);
    at += segments[i] + ids;
  }
  if (at != end && Lane() == 0) *wrong = 1;
}

}  // namespace join_messages
}  // namespace fusedrec
