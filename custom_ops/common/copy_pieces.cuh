// Copies arrays of any lengths to others in one launch.
#pragma once

#include "common/pieces.cuh"

namespace fusedrec {

struct CopiedPiece {
  int64_t begin;
  const int64_t* from;
  int64_t* to;
};

// Copies all pieces; `total` is the sum of their entries.
static __global__ void __launch_bounds__(kPieceThreads)
    CopyPiecesKernel(const CopiedPiece* __restrict__ pieces, int64_t count, int64_t total) {
  for (int64_t i = GlobalThread(); i < total; i += static_cast<int64_t>(gridDim.x) * kPieceThreads) {
    const CopiedPiece& piece = PieceOf(pieces, count, i);
    piece.to[i - piece.begin] = piece.from[i - piece.begin];
  }
}

}  // namespace fusedrec
