#include "partial_sums/partial_sums.h"

#include <algorithm>
#include <utility>

#include "common/limits.h"

namespace fusedrec {
namespace {

// Calls body(bag, segment) for each bag with an id.
template <typename Body>
void ForBags(const BagIds& ids, const Body& body) {
  size_t s = 0;
  for (size_t g = 0; g + 1 < ids.bag_splits.size(); ++g) {
    if (ids.bag_splits[g] == ids.bag_splits[g + 1]) continue;
    while (ids.segment_splits[s + 1] <= ids.bag_splits[g]) ++s;
    body(g, s);
  }
}

}  // namespace

std::vector<bool> ChooseSums(const BagIds& ids, int64_t num_ranks, int64_t row_bytes) {
  const size_t segments = ids.segment_splits.size() - 1;
  std::vector<int64_t> sums(segments, 0);
  ForBags(ids, [&](size_t g, size_t s) {
    sums[s] += std::min(ids.bag_splits[g + 1] - ids.bag_splits[g], num_ranks);
  });
  std::vector<bool> summed(segments);
  for (size_t s = 0; s < segments; ++s) {
    const int64_t num_ids = ids.segment_splits[s + 1] - ids.segment_splits[s];
    const int64_t num_unique = ids.unique_splits[s + 1] - ids.unique_splits[s];
    summed[s] = 3 * (2 * row_bytes * sums[s] + 4 * num_ids) < 2 * (2 * row_bytes * num_unique);
  }
  return summed;
}

SumPlan PlanSums(const BagIds& ids, const std::vector<bool>& summed, absl::Span<const int32_t> restore,
                 absl::Span<const int32_t> id_splits) {
  const size_t ranks = id_splits.size();
  SumPlan plan;
  if (std::find(summed.begin(), summed.end(), true) == summed.end()) {
    plan.terms.assign(ranks, 0);
    plan.terms_splits.assign(ranks, 1);
    plan.sum_splits.assign(id_splits.begin(), id_splits.end());
    plan.bag_splits.assign(ids.bag_splits.begin(), ids.bag_splits.end());
    for (const int32_t u : ids.inverse) plan.index.push_back(restore[u]);
    return plan;
  }
  std::vector<int32_t> begin(ranks, 0);  // of each block of ids
  for (size_t r = 1; r < ranks; ++r) begin[r] = begin[r - 1] + id_splits[r - 1];
  // A processor cannot guess a branch on the owner of an id, which is random. No loop over ids has one.
  struct Home {
    int32_t owner, place;  // inside the owner's block of ids
  };
  std::vector<Home> homes(restore.size());
  for (size_t u = 0; u < homes.size(); ++u) {
    const int32_t* block = begin.data();  // the last one that begins at or before the id
    for (size_t size = ranks; size > 1;) {
      const size_t half = size / 2;
      block += half * (block[half] <= restore[u]);
      size -= half;
    }
    homes[u] = {static_cast<int32_t>(block - begin.data()), restore[u] - *block};
  }
  // Calls row(u) for each id of a segment of rows, then term(u, bag) for each term of a bag.
  const auto for_terms = [&](const auto& row, const auto& term) {
    for (size_t s = 0; s < summed.size(); ++s) {
      for (int64_t u = ids.unique_splits[s]; !summed[s] && u < ids.unique_splits[s + 1]; ++u) row(u);
    }
    ForBags(ids, [&](size_t g, size_t s) {
      for (int64_t n = ids.bag_splits[g]; summed[s] && n < ids.bag_splits[g + 1]; ++n) term(ids.inverse[n], g);
    });
  };
  std::vector<int64_t> terms(ranks, 0), last(ranks, -1), at(ranks);
  plan.sum_splits.assign(ranks, 0);
  for_terms(
      [&](int64_t u) {
        ++terms[homes[u].owner];
        ++plan.sum_splits[homes[u].owner];
      },
      [&](int64_t u, int64_t bag) {
        const int32_t owner = homes[u].owner;
        ++terms[owner];
        plan.sum_splits[owner] += std::exchange(last[owner], bag) != bag;
      });
  std::vector<int32_t> next(ranks);  // number of the next sum of each owner
  int32_t sums = 0;
  for (size_t r = 0; r < ranks; ++r) {
    const int64_t words = (terms[r] + 1) / 2;
    plan.terms.push_back(words);
    at[r] = 2 * plan.terms.size();
    plan.terms.resize(plan.terms.size() + words, -1);
    plan.terms_splits.push_back(static_cast<int32_t>(1 + words));
    next[r] = sums;
    sums += plan.sum_splits[r];
  }
  uint32_t* const halves = reinterpret_cast<uint32_t*>(plan.terms.data());
  std::vector<int32_t> number(restore.size());  // by distinct id, of rows
  plan.bag_splits.assign(ids.bag_splits.size(), 0);
  last.assign(ranks, -1);
  std::vector<int32_t> of_bags(sums + 1);  // numbers of the sums of summed bags, bag by bag; one is written in vain
  int64_t end = 0;
  for_terms(
      [&](int64_t u) {
        const Home home = homes[u];
        halves[at[home.owner]++] = static_cast<uint32_t>(home.place) | kBegins;
        number[u] = next[home.owner]++;
      },
      [&](int64_t u, int64_t bag) {
        const Home home = homes[u];
        const bool begins = std::exchange(last[home.owner], bag) != bag;
        halves[at[home.owner]++] = static_cast<uint32_t>(home.place) | begins * kBegins;
        of_bags[end] = next[home.owner];
        end += begins;
        next[home.owner] += begins;
        plan.bag_splits[bag + 1] += begins;
      });
  auto of_bag = of_bags.begin();
  ForBags(ids, [&](size_t g, size_t s) {
    int64_t& count = plan.bag_splits[g + 1];
    if (summed[s]) {
      std::sort(of_bag, of_bag + count);
      plan.index.insert(plan.index.end(), of_bag, of_bag + count);
      of_bag += count;
      return;
    }
    count = ids.bag_splits[g + 1] - ids.bag_splits[g];
    for (int64_t n = ids.bag_splits[g]; n < ids.bag_splits[g + 1]; ++n) {
      plan.index.push_back(number[ids.inverse[n]]);
    }
  });
  for (size_t g = 1; g < plan.bag_splits.size(); ++g) plan.bag_splits[g] += plan.bag_splits[g - 1];
  return plan;
}

absl::Status ReadSums(absl::Span<const int64_t> terms, absl::Span<const int32_t> terms_splits,
                      absl::Span<const int32_t> id_splits, std::vector<int32_t>* index, std::vector<int64_t>* splits,
                      absl::Span<int32_t> sum_splits) {
  const bool all_rows = terms.size() == id_splits.size();  // headers alone
  size_t begin = 0;
  int32_t first_id = 0;
  for (size_t r = 0; r < id_splits.size(); ++r) {
    const size_t words = terms_splits[r] < 1 ? terms.size() : terms_splits[r] - 1, before = splits->size();
    if (begin + 1 + words > terms.size() || terms[begin] != static_cast<int64_t>(words)) {
      return Invalid("terms of rank ", r, " must have as many words as their header says, got ", terms_splits[r],
          " entries. Use one version of tf_fusedrec on all ranks.");
    }
    const uint32_t* const halves = reinterpret_cast<const uint32_t*>(&terms[begin] + 1);
    for (size_t i = 0; i < 2 * words && halves[i] != kNoTerm; ++i) {
      const int64_t place = halves[i] & ~kBegins;
      if (place >= id_splits[r]) {
        return Invalid("terms of rank ", r, " must name its ", id_splits[r], " ids, got ", place,
            ". Use one version of tf_fusedrec on all ranks.");
      }
      if (i == 0 || (halves[i] & kBegins) != 0) splits->push_back(index->size());
      index->push_back(static_cast<int32_t>(first_id + place));
    }
    for (int32_t n = 0; words == 0 && !all_rows && n < id_splits[r]; ++n) {
      splits->push_back(index->size());
      index->push_back(first_id + n);
    }
    sum_splits[r] = all_rows ? id_splits[r] : static_cast<int32_t>(splits->size() - before);
    first_id += id_splits[r];
    begin += 1 + words;
  }
  splits->push_back(index->size());
  return absl::OkStatus();
}

}  // namespace fusedrec
