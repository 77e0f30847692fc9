// Pooled features whose owners send sums of rows in place of rows, where that is fewer bytes.
//
// Source: the row-wise shards of TorchRec. The partial sum of a bag at an owner is the sum of the rows that the bag has
// there. Each one travels once, and one gradient for it travels back.
//
// # Rows or sums
// The requesting rank decides for each segment by counted bytes, and the owner needs no decision. Of N ids, U are distinct:
//     rows   each with its gradient: U * 2 * row_bytes
//     sums   at most min(ids, R) of each bag, and a number for each id: 2 * row_bytes * sums + 4 * N
// Sums must save a third, because the owner then passes twice over its rows and gradients, those of segments of rows
// included. Ids that many bags share travel as rows; long bags of rare ids, on few ranks, as sums. Distinct ids travel
// either way, so that the owner looks up each one once.
//
// # Terms
// Beside the ids of rank_partition.h travels a block [ words | terms ] for each owner, two terms in a word. A term is the
// place of an id in the owner's block of ids, with kBegins where a sum begins; kNoTerm fills the last word. A row is a sum
// of one id. Where no segment travels as sums, blocks have no words. Example with R = 2, owner = id mod 2:
//     ids      7 4 3 | 8 4 4 | 5       bags of three, three and one; unique 7 4 3 8 5
//     blocks   4 8 | 7 3 5             ids at rank 0 and at rank 1
//     terms    0' 1' 0 0 | 0' 1 2'     sums 4, 8 + 4 + 4 | 7 + 3, 5, numbered 0 1 2 3
//     index    0 2 | 1 | 3             of each bag: the sums to add, in the order of ranks
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace fusedrec {

constexpr uint32_t kBegins = 0x80000000, kNoTerm = 0xffffffff;

struct BagIds {
  absl::Span<const int64_t> segment_splits;  // [S+1]
  absl::Span<const int64_t> bag_splits;      // [G+1], each bag inside one segment (caller checks)
  absl::Span<const int64_t> unique_splits;   // [S+1], and inverse [N]: results of SegmentUnique
  absl::Span<const int32_t> inverse;
};

// Returns whether each segment travels as sums.
std::vector<bool> ChooseSums(const BagIds& ids, int64_t num_ranks, int64_t row_bytes);

struct SumPlan {
  std::vector<int64_t> terms, bag_splits;         // bag_splits [G+1], bounds of the bags inside index
  std::vector<int32_t> terms_splits, sum_splits;  // [R], entries of each block of terms; sums of each owner
  std::vector<int32_t> index;                     // numbers of the sums of each bag, in the order in which they return
};

// restore [U], id_splits [R]: results of RankPartition.
SumPlan PlanSums(const BagIds& ids, const std::vector<bool>& summed, absl::Span<const int32_t> restore,
                 absl::Span<const int32_t> id_splits);

// At the owner: reads the terms of all sources.
//   id_splits   [R], received ids
//   index       out: place of each term among the received ids; empty if rows return to all sources
//   splits      out: [M+1], bounds of the sums inside index
//   sum_splits  [R]  out: sums, or rows, of each source
absl::Status ReadSums(absl::Span<const int64_t> terms, absl::Span<const int32_t> terms_splits,
                      absl::Span<const int32_t> id_splits, std::vector<int32_t>* index, std::vector<int64_t>* splits,
                      absl::Span<int32_t> sum_splits);

}  // namespace fusedrec
