#include "window_rows/window_rows.h"

#include "common/counting_sort.h"
#include "common/limits.h"
#include "common/try.h"
#include "rank_partition/rank_partition.h"
#include "segment_unique/segment_unique.h"

namespace fusedrec {
namespace {

int64_t BitsOfMark(int64_t pieces) {
  int64_t bits = 1;
  while ((int64_t{1} << bits) < pieces) ++bits;
  return bits;
}

int64_t NumIds(const MessageView& message, int64_t segments) {
  int64_t entries = 0;
  for (const int32_t block : message.splits) entries += block - segments;
  return entries;
}

// Calls visit(piece, peer, first row, rows) for every block, in the order of row numbers.
template <typename Visit>
void ForBlocks(const std::vector<MessageView>& messages, int64_t segments, const Visit& visit) {
  int64_t row = 0;
  for (size_t i = 0; i < messages.size(); ++i) {
    for (size_t r = 0; r < messages[i].splits.size(); ++r) {
      const int64_t rows = messages[i].splits[r] - segments;
      visit(i, r, row, rows);
      row += rows;
    }
  }
}

std::vector<int64_t> RowsOfPeers(const std::vector<MessageView>& messages, int64_t segments) {
  std::vector<int64_t> rows(messages[0].splits.size(), 0);
  ForBlocks(messages, segments, [&](size_t, size_t r, int64_t, int64_t count) { rows[r] += count; });
  return rows;
}

}  // namespace

int64_t WindowUnique(const std::vector<PieceIds>& pieces, const ParallelFor& parallel_for, absl::Span<int32_t> last) {
  // Ids of all pieces by segment; inside a segment by piece.
  const int64_t total = last.size(), segments = pieces[0].splits.size() - 1;
  std::vector<int64_t> ids(total), splits(segments + 1, 0), distinct(total), distinct_splits(segments + 1);
  auto to = ids.begin();
  for (int64_t s = 0; s < segments; ++s) {
    for (const PieceIds& piece : pieces) {
      to = std::copy(piece.ids.begin() + piece.splits[s], piece.ids.begin() + piece.splits[s + 1], to);
    }
    splits[s + 1] = to - ids.begin();
  }
  std::vector<int32_t> inverse(total);
  SegmentUnique(ids, splits, parallel_for, absl::MakeSpan(distinct), absl::MakeSpan(distinct_splits),
                absl::MakeSpan(inverse));

  std::vector<int32_t> number_of(total, -1);
  std::vector<int64_t> next(splits.begin(), splits.end() - 1);
  int32_t numbers = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const PieceIds& piece = pieces[i];
    int64_t added = 0;
    piece.new_splits[0] = 0;
    for (int64_t s = 0; s < segments; ++s) {
      for (int64_t u = piece.splits[s]; u < piece.splits[s + 1]; ++u) {
        int32_t& number = number_of[inverse[next[s]++]];
        if (number < 0) {
          number = numbers++;
          piece.new_ids[added++] = piece.ids[u];
        }
        piece.number[u] = number;
        last[number] = static_cast<int32_t>(i);
      }
      piece.new_splits[s + 1] = added;
    }
  }
  return numbers;
}

absl::Status CheckWindow(const std::vector<MessageView>& messages, int64_t segments, int64_t* ids) {
  FUSEDREC_TRY(CheckBlocks(messages));
  *ids = 0;
  for (size_t i = 0; i < messages.size(); ++i) {
    int64_t at = 0;
    for (size_t r = 0; r < messages[i].splits.size(); ++r) {
      const int64_t block = messages[i].splits[r];
      if (block < segments) {
        return Invalid("splits[", i, "][", r, "] must be at least the ", segments, " counts of a header, got ", block,
            ".", kEqualRanks);
      }
      const absl::Status status = CheckHeader(r, messages[i].entries.subspan(at, segments), block - segments);
      if (!status.ok()) {
        return Invalid("messages[", i, "]: ", status.message());
      }
      at += block;
      *ids += block - segments;
    }
  }
  return RequireIn("the number of ids in messages", *ids, 0, kMostPositions, "smaller batches.");
}

std::vector<PieceGradients> OrderGradients(const std::vector<MessageView>& messages, int64_t segments,
                                           absl::Span<const int32_t> last) {
  const size_t pieces = messages.size(), peers = messages[0].splits.size();
  std::vector<PieceGradients> gradients(pieces);
  for (PieceGradients& of_piece : gradients) of_piece.counts.assign(peers * segments, 0);
  struct Block {
    const int64_t *header, *id;  // the next id
    int64_t row;                 // its number
  };
  std::vector<Block> blocks;  // by piece, then by peer
  const int64_t* at = nullptr;
  ForBlocks(messages, segments, [&](size_t i, size_t r, int64_t first, int64_t rows) {
    if (r == 0) at = messages[i].entries.data();
    blocks.push_back({at, at + segments, first});
    at += segments + rows;
  });
  for (size_t r = 0; r < peers; ++r) {
    for (int64_t s = 0; s < segments; ++s) {
      for (size_t i = 0; i < pieces; ++i) {
        Block& block = blocks[i * peers + r];
        for (int64_t left = block.header[s]; left > 0; --left) {
          PieceGradients& of_piece = gradients[last[block.row]];
          of_piece.row.push_back(static_cast<int32_t>(block.row++));
          of_piece.ids.push_back(*block.id++);
          ++of_piece.counts[r * segments + s];
        }
      }
    }
  }
  return gradients;
}

absl::Status NumberRows(const std::vector<MessageView>& messages, int64_t segments, const std::vector<PieceRows>& pieces,
                        absl::Span<const int32_t> last, absl::Span<int32_t> last_row) {
  const int64_t rows = last_row.size(), count = pieces.size();
  std::vector<int32_t> row_of(rows), first(rows);  // by number
  std::fill(last_row.begin(), last_row.end(), -1);
  int64_t begin = 0;
  for (int64_t i = 0; i < count; ++i) {
    const absl::Span<const int32_t> restore = pieces[i].restore;
    const int64_t ids = NumIds(messages[i], segments);
    if (static_cast<int64_t>(restore.size()) != ids) {
      return Invalid("restore[", i, "] must have one entry for each of the ", ids, " ids of messages[", i, "], got ",
          restore.size(), ". Pass the outputs of rank_partition.");
    }
    for (int64_t n = 0; n < ids; ++n) {
      if (restore[n] < 0 || restore[n] >= ids || last_row[begin + restore[n]] >= 0) {
        return Invalid("restore[", i, "] must hold each row in [0, ", ids, ") once, got ", restore[n], " at entry ", n,
            ". Pass the outputs of rank_partition.");
      }
      const int32_t of_id = last[begin + n];
      if (of_id < i || of_id >= count) {
        return Invalid("last[", begin + n, "] must lie in [", i, ", ", count, "), got ", of_id,
            ". Pass the outputs of window_unique.");
      }
      row_of[begin + n] = static_cast<int32_t>(begin + restore[n]);
      first[begin + n] = static_cast<int32_t>(i);
      last_row[begin + restore[n]] = of_id;
    }
    begin += ids;
  }
  for (int64_t i = 0; i < count; ++i) {
    for (size_t u = 0; u < pieces[i].number.size(); ++u) {
      const int32_t number = pieces[i].number[u];
      if (number < 0 || number >= rows || first[number] > i || last[number] < i) {
        return Invalid("numbers[", i, "][", u, "] must name an id that piece ", i, " holds, in [0, ", rows, "), got ",
            number, ". Pass the outputs of window_unique.");
      }
      pieces[i].row[u] = row_of[number];
    }
  }
  return absl::OkStatus();
}

std::vector<int64_t> PackMarks(const std::vector<MessageView>& messages, int64_t segments,
                               absl::Span<const int32_t> last_row, absl::Span<int32_t> splits) {
  const int64_t bits = BitsOfMark(messages.size()), per_word = 64 / bits;
  const std::vector<int64_t> rows = RowsOfPeers(messages, segments);
  std::vector<int64_t> begin(rows.size()), done(rows.size(), 0);
  int64_t size = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    begin[r] = size;
    splits[r] = static_cast<int32_t>(1 + (rows[r] + per_word - 1) / per_word);
    size += splits[r];
  }
  std::vector<int64_t> marks(size, 0);
  for (size_t r = 0; r < rows.size(); ++r) marks[begin[r]] = splits[r] - 1;
  ForBlocks(messages, segments, [&](size_t, size_t r, int64_t first, int64_t count) {
    for (int64_t n = 0; n < count; ++n, ++done[r]) {
      const uint64_t mark = static_cast<uint64_t>(last_row[first + n]) << (done[r] % per_word * bits);
      int64_t& word = marks[begin[r] + 1 + done[r] / per_word];
      word = static_cast<int64_t>(static_cast<uint64_t>(word) | mark);
    }
  });
  return marks;
}

absl::Status ReadMarks(const std::vector<MessageView>& messages, int64_t segments, const MessageView& marks,
                       absl::Span<int32_t> last_row) {
  const int64_t pieces = messages.size(), bits = BitsOfMark(pieces), per_word = 64 / bits;
  const std::vector<int64_t> rows = RowsOfPeers(messages, segments);
  if (marks.splits.size() != rows.size()) {
    return Invalid("marks_splits must have one entry for each of the ", rows.size(), " ranks of messages, got ",
        marks.splits.size(), ".", kEqualRanks);
  }
  std::vector<int64_t> begin(rows.size()), done(rows.size(), 0);
  int64_t size = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    const int64_t wanted = 1 + (rows[r] + per_word - 1) / per_word;
    if (marks.splits[r] != wanted || size + wanted > static_cast<int64_t>(marks.entries.size())) {
      return Invalid("marks must have ", wanted, " entries for the ", rows[r], " ids of rank ", r, ", got ",
          marks.splits[r], " of ", marks.entries.size() - size, " left.", kEqualRanks);
    }
    begin[r] = size + 1;
    size += wanted;
  }
  absl::Status status;
  ForBlocks(messages, segments, [&](size_t i, size_t r, int64_t first, int64_t count) {
    for (int64_t n = 0; n < count; ++n, ++done[r]) {
      const uint64_t word = marks.entries[begin[r] + done[r] / per_word];
      const int64_t last = (word >> (done[r] % per_word * bits)) & ((uint64_t{1} << bits) - 1);
      if ((last < static_cast<int64_t>(i) || last >= pieces) && status.ok()) {
        status = Invalid("marks of rank ", r, " give the last piece ", last, " to an id of piece ", i, ", outside [", i,
            ", ", pieces, ").", kEqualRanks);
      }
      last_row[first + n] = static_cast<int32_t>(last);
    }
  });
  return status;
}

std::vector<PieceSums> SumTerms(const std::vector<PieceGradients>& gradients, const std::vector<PieceRows>& pieces,
                                int64_t rows) {
  // terms[begin[v] .. begin[v + 1]): the ids of all pieces whose row is v, in the order of pieces.
  size_t total = 0;
  for (const PieceRows& piece : pieces) total += piece.row.size();
  std::vector<int32_t> row_of;
  row_of.reserve(total);
  for (const PieceRows& piece : pieces) row_of.insert(row_of.end(), piece.row.begin(), piece.row.end());
  std::vector<int64_t> begin(rows + 2);
  std::vector<int32_t> terms(row_of.size());
  CountingSort(row_of.size(), rows, [&](int64_t n) { return row_of[n]; }, begin.data(),
               [&](int64_t n, int64_t to) { terms[to] = static_cast<int32_t>(n); });
  std::vector<PieceSums> sums;
  for (const PieceGradients& of_piece : gradients) {
    PieceSums& sum = sums.emplace_back();
    sum.splits.push_back(0);
    for (const int32_t row : of_piece.row) {
      sum.index.insert(sum.index.end(), terms.begin() + begin[row], terms.begin() + begin[row + 1]);
      sum.splits.push_back(sum.index.size());
    }
  }
  return sums;
}

}  // namespace fusedrec
