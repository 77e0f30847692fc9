// Arrays of any lengths that one launch goes over as if they lay one behind the other.
//
// A piece has a field `begin`: the entries of the pieces before it. The first piece begins at 0.
#pragma once

#include "common/loop_blocks.cuh"

namespace fusedrec {

constexpr int kPieceThreads = 256;

// The piece of entry i: the last one that begins at i or before. Empty pieces have no entry.
template <typename Piece>
__device__ inline const Piece& PieceOf(const Piece* __restrict__ pieces, int64_t count, int64_t i) {
  int64_t low = 0, high = count - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (pieces[middle].begin <= i) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return pieces[low];
}

}  // namespace fusedrec
