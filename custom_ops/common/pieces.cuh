// Arrays of any lengths that one launch goes over as if they were one array.
//
// A piece has a field `begin`: the entries of the pieces before it. The first piece begins at 0.
#pragma once

#include "common/device.cuh"
#include "common/host_device.h"

namespace fusedrec {

// The piece of entry i: the last one that begins at i or before. Empty pieces have no entry.
template <typename Piece>
__device__ inline const Piece& PieceOf(const Piece* __restrict__ pieces, int64_t count, int64_t i) {
  return pieces[LastBegun([&](int64_t p) { return pieces[p].begin; }, int64_t{0}, count - 1, i)];
}

struct CopiedPiece {
  int64_t begin;
  const int64_t* from;
  int64_t* to;
};

// Copies all pieces; `total` is the sum of their entries.
FUSEDREC_KERNEL CopyPiecesKernel(const CopiedPiece* __restrict__ pieces, int64_t count, int64_t total) {
  for (int64_t i = GlobalThread(); i < total; i += GridThreads()) {
    const CopiedPiece& piece = PieceOf(pieces, count, i);
    piece.to[i - piece.begin] = piece.from[i - piece.begin];
  }
}

}  // namespace fusedrec
