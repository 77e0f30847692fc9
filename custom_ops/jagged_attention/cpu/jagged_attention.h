// SiLU attention over rows of different length with a relative bias, and the attention-free channels of FuXi, forward
// and backward.
//   out_i = scale_i * sum over j of SiLU(alpha q_i . k_j + bias_ij) visible_ij v_j      in each row and head
//   bias_ij = position_weights[N - 1 + place(j) - place(i)] + time(asks_i - answers_j)   shared by the heads
//   channels: out_i = [ sum over j of position_ij visible_ij v_j | sum over j of time_ij visible_ij v_j ]
//
// Sources: Zhai et al., Actions Speak Louder than Words (HSTU): the attention and its masks; Ye et al., FuXi-alpha and
// FuXi-beta: the channels. visibility.inc.h has the rule of visibility.
//
// A row may have fewer queries than keys, as when a server keeps the keys and values of a user's history. The queries
// are its last tokens, at their places in the row. A query sums its keys in the order of their places, however the work
// is cut. Its result has the bits of a call in which every token asks (short rows sum in another order).
//
// # How
// A row is cut into panels of queries and tiles of keys. A tile of scores stays in the cache of one core between the
// products that make it and the products that use it. Nothing of size sequence x sequence is kept; the backward pass
// computes the scores again. Tiles without a visible pair are never visited. Tiles with only visible pairs need no mask.
// There is no softmax, so tiles simply add up. Rows of one panel have a simpler path (engine_short.inc.h).
//
// Threads take units of work (a block of queries forward, a block of keys backward), the costliest first. Only the lengths
// of the rows decide how the work is cut. Each unit writes where no other unit writes. Sums over several units (gradients
// of queries of long rows, of the weights of the bias) are added in the order of the units afterwards. So the result is
// the same for any number of threads.
//
// # Gate and norm
// A call with a gate ends with the gate and the norm of an HSTU block. A norm of all columns needs all heads, which several
// units may have. The last of them to finish gates the tokens of their block, which are still in a cache. Backward, one
// pass over the tokens makes the gradients of gate and attention, because every unit reads these.
//
// The tile engine is compiled for several instruction sets (tile_engine.h); they differ in the last bits of results.
#pragma once

#include <vector>

#include "common/parallel.h"
#include "jagged_attention/call.h"
#include "jagged_attention/cpu/tile_engine.h"

namespace fusedrec {

// Attention, or the channels of a call that has them.
void AttentionForward(const AttentionCall<float>& call, const TileEngine& engine, const ParallelFor& parallel_for);
void AttentionBackward(const AttentionCall<float>& call, const TileEngine& engine, const ParallelFor& parallel_for);

// Engines that this processor can run, the best one first.
std::vector<const TileEngine*> Engines();

}  // namespace fusedrec
