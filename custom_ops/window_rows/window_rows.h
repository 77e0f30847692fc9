// Rows that several micro-batches (pieces) of one batch share. A row travels once, and so does its gradient.
//
// Tables do not change between the pieces of a batch (NestPipe, section V). So the row of an id leaves its owner with the
// first piece that holds the id. Its gradient leaves the asking rank with the last piece that holds it, as a sum over
// pieces. The rank that asks and the rank that owns must agree on the order of both.
//
// # Orders
// New ids of piece i travel in one message per piece, as RankPartition makes it. The rows come back in the order of the
// ids. Rows are numbered in the order of arrival: by piece, by peer (owner or source), then by place in the block.
// Gradients of piece i are ordered by peer, by segment, then by number of the row. So the ids of the gradients form a
// message in the format of RankPartition.
//
// # Marks
// The owner does not know the last piece of an id. The marks say it: one more message of the same all-to-all, with a block
// [ count | words ] for each peer. A word packs 64 / b last pieces of b bits each, in the order of the peer's rows. Bits
// are those of M - 1: half a byte for each id of 9 to 16 pieces, 3 bits for 5 to 8.
//
// # Example, M = 2, S = 1, one owner
//     ids of pieces   7 5 | 5 9         new ids 7 5 | 9        numbers 0 1 | 1 2
//     last            0 1 1             gradients that leave: of row 0 with piece 0; of rows 1 and 2 with piece 1
#pragma once

#include "common/parallel.h"
#include "join_messages/join_messages.h"

namespace fusedrec {

constexpr int64_t kMostPieces = 1 << 16;

struct PieceIds {
  absl::Span<const int64_t> ids;     // [u]
  absl::Span<const int64_t> splits;  // [S+1], checked by the caller
  absl::Span<int64_t> new_ids;       // [u] out: the first entries are the ids that no piece before holds
  absl::Span<int64_t> new_splits;    // [S+1] out: their segments
  absl::Span<int32_t> number;        // [u] out: number of each id among the new ids of all pieces, one piece after another
};

// Numbers the distinct ids of all pieces by first occurrence.
//   last  [sum of all u]  out: the first U entries are the last piece of each id, by number
//
// Returns U.
int64_t WindowUnique(const std::vector<PieceIds>& pieces, const ParallelFor& parallel_for, absl::Span<int32_t> last);

struct PieceGradients {
  std::vector<int32_t> row;     // [e] number of the row of each gradient
  std::vector<int64_t> ids;     // [e] its id
  std::vector<int64_t> counts;  // [R * S] gradients by peer and segment
};

// Checks that messages have blocks of the same peers, with whole headers, and at most kMostPositions ids in all, *ids.
absl::Status CheckWindow(const std::vector<MessageView>& messages, int64_t segments, int64_t* ids);

// The order of gradients, from messages checked by CheckWindow.
//   last  [V]  last piece of each row, each in [0, M)
std::vector<PieceGradients> OrderGradients(const std::vector<MessageView>& messages, int64_t segments,
                                           absl::Span<const int32_t> last);

struct PieceRows {
  absl::Span<const int32_t> restore;  // [n] row of each new id among the rows of this piece, as RankPartition gives it
  absl::Span<const int32_t> number;   // [u] from WindowUnique
  absl::Span<int32_t> row;            // [u] out: number of the row of each id of the piece
};

// Numbers rows as they arrive.
//   messages   [M] that RankPartition made of the new ids, checked by CheckWindow
//   last       [U] from WindowUnique
//   last_row   [U] out: the same by number of the row
absl::Status NumberRows(const std::vector<MessageView>& messages, int64_t segments, const std::vector<PieceRows>& pieces,
                        absl::Span<const int32_t> last, absl::Span<int32_t> last_row);

// The marks of all peers; splits [R], out: entries of each block.
std::vector<int64_t> PackMarks(const std::vector<MessageView>& messages, int64_t segments,
                               absl::Span<const int32_t> last_row, absl::Span<int32_t> splits);

// Reads marks that came from peers; last_row [V], out.
absl::Status ReadMarks(const std::vector<MessageView>& messages, int64_t segments, const MessageView& marks,
                       absl::Span<int32_t> last_row);

// The terms of each gradient that leaves with a piece: numbers of ids in all pieces, one piece after another.
struct PieceSums {
  std::vector<int32_t> index;   // [k]
  std::vector<int64_t> splits;  // [e+1] terms of gradient e are index[splits[e]:splits[e+1]], in the order of pieces
};

std::vector<PieceSums> SumTerms(const std::vector<PieceGradients>& gradients, const std::vector<PieceRows>& pieces,
                                int64_t rows);

}  // namespace fusedrec
