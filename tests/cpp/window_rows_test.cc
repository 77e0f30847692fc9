// The plan of a window, from random pieces: every id has one row, its marks come through, every gradient leaves once, and
// what lies is refused without a read beyond an array.
#include "window_rows/window_rows.h"

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "rank_partition/rank_partition.h"
#include "threads.h"

namespace fusedrec {
namespace {

constexpr int64_t kSegments = 2;

struct Window {
  std::vector<std::vector<int64_t>> ids, splits, new_ids, new_splits, entries;
  std::vector<std::vector<int32_t>> number, row, restore, send_splits;
  std::vector<int32_t> last, last_row;

  std::vector<MessageView> Messages() const {
    std::vector<MessageView> messages;
    for (size_t i = 0; i < entries.size(); ++i) messages.push_back({entries[i], send_splits[i]});
    return messages;
  }

  std::vector<PieceRows> Rows() {
    std::vector<PieceRows> rows;
    for (size_t i = 0; i < ids.size(); ++i) rows.push_back({restore[i], number[i], absl::MakeSpan(row[i])});
    return rows;
  }
};

Window Planned(int pieces, int ranks, std::mt19937* random) {
  Window window;
  std::vector<PieceIds> of_pieces(pieces);
  for (int i = 0; i < pieces; ++i) {
    std::vector<int64_t>& ids = window.ids.emplace_back();
    std::vector<int64_t>& splits = window.splits.emplace_back(1, 0);
    for (int64_t s = 0; s < kSegments; ++s) {
      for (int64_t id = 0; id < 30; ++id) {
        if ((*random)() % 3 == 0) ids.push_back(id == 0 ? std::numeric_limits<int64_t>::min() : id - 9);
      }
      splits.push_back(ids.size());
    }
    window.new_ids.emplace_back(ids.size());
    window.new_splits.emplace_back(splits.size());
    window.number.emplace_back(ids.size());
    window.row.emplace_back(ids.size());
  }
  size_t total = 0;
  for (int i = 0; i < pieces; ++i) {
    total += window.ids[i].size();
    of_pieces[i] = {window.ids[i], window.splits[i], absl::MakeSpan(window.new_ids[i]),
                    absl::MakeSpan(window.new_splits[i]), absl::MakeSpan(window.number[i])};
  }
  window.last.resize(total);
  window.last.resize(WindowUnique(of_pieces, Threads(3), absl::MakeSpan(window.last)));
  for (int i = 0; i < pieces; ++i) {
    window.new_ids[i].resize(window.new_splits[i].back());
    const size_t count = window.new_ids[i].size();
    std::vector<int32_t> id_splits(ranks);
    window.restore.emplace_back(count);
    window.send_splits.emplace_back(ranks);
    window.entries.emplace_back(count + ranks * kSegments + 5);  // with padding
    RankPartition(window.new_ids[i], window.new_splits[i], Owner::kHashRange, Threads(2),
                  absl::MakeSpan(window.entries[i]), absl::MakeSpan(window.send_splits[i]), absl::MakeSpan(id_splits),
                  absl::MakeSpan(window.restore[i]));
  }
  window.last_row.resize(window.last.size());
  int64_t ids;
  CHECK_OK(CheckWindow(window.Messages(), kSegments, &ids));
  CHECK_OK(NumberRows(window.Messages(), kSegments, window.Rows(), window.last, absl::MakeSpan(window.last_row)));
  return window;
}

void EveryIdHasOneRowAndOneGradient(int pieces, int ranks, int seed) {
  std::mt19937 random(seed);
  Window window = Planned(pieces, ranks, &random);
  std::map<std::pair<int64_t, int64_t>, int32_t> row_of, last_of;
  for (int i = 0; i < pieces; ++i) {
    for (int64_t s = 0; s < kSegments; ++s) {
      for (int64_t u = window.splits[i][s]; u < window.splits[i][s + 1]; ++u) {
        const auto [found, is_new] = row_of.insert({{s, window.ids[i][u]}, window.row[i][u]});
        CHECK_EQ(window.row[i][u], found->second, "piece ", i, ", id ", window.ids[i][u]);
        last_of[found->first] = i;
      }
    }
  }
  CHECK_EQ(row_of.size(), window.last.size());
  for (const auto& [key, row] : row_of) CHECK_EQ(window.last_row[row], last_of[key], "id ", key.second);

  std::vector<int32_t> marks_splits(ranks), read(window.last_row.size());
  const std::vector<int64_t> marks =
      PackMarks(window.Messages(), kSegments, window.last_row, absl::MakeSpan(marks_splits));
  CHECK_OK(ReadMarks(window.Messages(), kSegments, {marks, marks_splits}, absl::MakeSpan(read)));
  CHECK(read == window.last_row);

  const std::vector<PieceGradients> gradients = OrderGradients(window.Messages(), kSegments, window.last_row);
  const std::vector<PieceSums> sums = SumTerms(gradients, window.Rows(), window.last_row.size());
  std::vector<bool> sent(row_of.size());
  std::vector<int32_t> row_of_term;
  for (const auto& rows : window.row) row_of_term.insert(row_of_term.end(), rows.begin(), rows.end());
  for (int i = 0; i < pieces; ++i) {
    for (size_t e = 0; e < gradients[i].row.size(); ++e) {
      const int32_t row = gradients[i].row[e];
      CHECK(!sent[row] && window.last_row[row] == i);
      sent[row] = true;
      CHECK(sums[i].splits[e] < sums[i].splits[e + 1]);
      for (int64_t k = sums[i].splits[e]; k < sums[i].splits[e + 1]; ++k) {
        CHECK_EQ(row_of_term[sums[i].index[k]], row);
        CHECK(k == sums[i].splits[e] || sums[i].index[k - 1] < sums[i].index[k], "terms are in the order of pieces");
      }
    }
  }
  CHECK(std::count(sent.begin(), sent.end(), false) == 0);
}

void Refused(const absl::Status& status, const std::string& words) {
  CHECK(!status.ok() && status.ToString().find(words) != std::string::npos, "got ", status.ToString(), "; wanted ", words);
}

void LiesAreRefused() {
  std::mt19937 random(7);
  Window window = Planned(4, 2, &random);
  std::vector<int32_t> out(window.last.size()), splits(2);
  const std::vector<int64_t> marks = PackMarks(window.Messages(), kSegments, window.last_row, absl::MakeSpan(splits));
  const auto read = [&](const std::vector<int64_t>& entries, const std::vector<int32_t>& blocks) {
    return ReadMarks(window.Messages(), kSegments, {entries, blocks}, absl::MakeSpan(out));
  };
  Refused(read({marks.begin(), marks.end() - 1}, splits), "marks must have");
  Refused(read(marks, {splits[0], std::numeric_limits<int32_t>::max()}), "marks must have");
  Refused(read(marks, {splits[0], -1}), "marks must have");
  Refused(read(marks, {splits[0]}), "marks_splits must have one entry");
  Refused(read(std::vector<int64_t>(marks.size(), 0), splits), "give the last piece 0 to an id of piece 1");

  const auto number = [&] {
    return NumberRows(window.Messages(), kSegments, window.Rows(), window.last, absl::MakeSpan(out));
  };
  const int32_t first = window.number[0][0];
  for (const int32_t wrong : {-1, std::numeric_limits<int32_t>::max(), static_cast<int32_t>(window.last.size())}) {
    window.number[0][0] = wrong;
    Refused(number(), "numbers[0][0] must name an id that piece 0 holds");
  }
  window.number[0][0] = first;
  window.restore[1][0] = window.restore[1][1];
  Refused(number(), "restore[1] must hold each row in");
  int64_t ids;
  window.entries[2][0] = std::numeric_limits<int64_t>::max();
  Refused(CheckWindow(window.Messages(), kSegments, &ids), "messages[2]: message of rank 0 counts");
  window.send_splits[2][0] = 1;
  Refused(CheckWindow(window.Messages(), kSegments, &ids), "splits[2][0] must be at least the 2 counts");
}

}  // namespace
}  // namespace fusedrec

TEST(window_rows) {
  for (const int pieces : {1, 2, 3, 8, 9, 17, 70}) {
    for (const int ranks : {1, 2, 5}) fusedrec::EveryIdHasOneRowAndOneGradient(pieces, ranks, pieces + ranks);
  }
  fusedrec::LiesAreRefused();
}
