// SiLU attention over rows of different length on a GPU, forward and backward, with its relative bias.
//
// jagged_attention.h has the contract: the same masks, the same bias by position and by time.
//
// # How
// A list holds tiles of rows of one sequence and head, the costliest first. A block takes one tile after another and goes
// over the tiles of columns that are not hidden. Forward, and for the gradient of the queries, the rows are queries and
// the columns keys. For the gradients of keys and values, the rows are keys and the columns queries. Products run on the
// tensor cores (attention_engine.cuh): bfloat16 and float16 with sums in float32, float32 as three products of tf32 parts.
// Scores live in registers and pass through shared memory as an operand of the next product. Nothing of size sequence x
// sequence reaches the device's memory. The backward pass computes the scores twice, for the gradient of the queries
// and for the other gradients. So one block sums each gradient in one order.
//
// # Bias
// Both parts come from small tables in shared memory (attention_shared.cuh): the weights of the distances of a tile, and
// the thresholds and weights of the buckets. A few steps lead from the bucket of a pair to its neighbour's, exactly,
// with integers and without logarithms. For the gradients, a thread owns a distance of the tile, and a lane owns a row
// and adds while the bucket stays the same. There are no atomic operations. At most kSlots blocks run, each
// with its own sums, which are added in order. So gradients are the same on every run. Functions of time
// (attention_time_function.cuh) have few parameters, whose sums each thread keeps in registers.
//
// # Gate and norm
// With `gate`, a call ends with the gate and the norm of an HSTU block, and begins its backward pass with their gradients
// (attention_gate.cuh).
//
// # The channels of FuXi
// The weights are the bias alone, one map of position and one of time, without queries and keys. So the first product
// drops out. All heads share a map, so the heads of a value are the columns of one product. A block has a slice of
// kLargeSlice columns (attention_launch.cuh) and a tile of queries. It reads a tile of values once and multiplies both maps
// with it. Backward, one pass over keys computes everything. One product gives the gradient of a map, another the
// gradient of the values. Slices add their share to the sums of the bias.
#pragma once

#include "common/cuda_api.h"
#include "jagged_attention/call.h"

// Attention, or the channels of a call that has them: they read no query, key, scale and alpha, and value_dim may have any
// size.
FUSEDREC_CUDA_API int fusedrec_attention(const fusedrec::AttentionCall<void>* call, const FusedrecAllocator* memory,
                                         void* stream);
FUSEDREC_CUDA_API int fusedrec_attention_grad(const fusedrec::AttentionCall<void>* call, const FusedrecAllocator* memory,
                                              void* stream);
