// Orders the samples of a batch so that its micro-batches share few ids: key-centric sample clustering (NestPipe,
// section V.C).
//
// An id is sent once to every micro-batch that holds it. The number of rows sent is the sum over ids of the number of
// micro-batches with that id. It is the connectivity of a hypergraph whose vertices are samples and whose nets are ids.
// The paper gives the goal, but no algorithm. This algorithm keeps every micro-batch's number of samples:
//   - Samples are sorted by tokens. A block of neighbours gives up its places, and its samples are assigned to the same
//     places anew. Counts never change, and tokens change only by the differences between neighbours.
//   - A sample prefers the micro-batch with its ids. Only an id that leaves a micro-batch entirely saves rows, and
//     single moves seldom achieve that. The cost of a place therefore counts copies, n copies of an id being worth
//     1 - 0.9^n, as well as presence. The weight of copies falls from sweep to sweep and finally only breaks ties.
//   - A place has a price per token, which is higher in a micro-batch with more than its share of tokens.
//   - Micro-batches of equal size change places at the end, so that neighbours share ids. Where schedules cut by tokens,
//     the few samples by which the bounds move then come to a micro-batch that holds many of their ids.
//
// Costs are integers, in units of 2^-26 ids, and random numbers are hashes of a counter. So the order is a function of
// the batch alone: the same on every machine, and in the oracle.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace fusedrec {

constexpr int64_t kMostMicroBatches = 4096;
constexpr int64_t kMostCopies = int64_t{1} << 28;  // counts of every shared id in every micro-batch

// The ids of one feature: sample b holds ids[splits[b]:splits[b+1]]. Equal ids of one table mean one row.
struct FeatureIds {
  int64_t table;
  absl::Span<const int64_t> ids;
  absl::Span<const int64_t> splits;  // [B+1], checked by the caller
};

//   features  ids of the batch; all features together hold fewer than 2^31 ids
//   sizes     [M]  samples of each micro-batch, >= 0, with sum B; 1 <= M <= kMostMicroBatches
//   order     [B]  out: numbers of the samples, micro-batch by micro-batch, ascending inside a micro-batch
// InvalidArgument: more than kMostCopies counts are needed.
absl::Status ClusterSamples(const std::vector<FeatureIds>& features, absl::Span<const int64_t> sizes,
                            absl::Span<int64_t> order);

}  // namespace fusedrec
