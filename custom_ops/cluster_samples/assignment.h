// A cheap assignment of n samples to n places in micro-batches.
//
// In each round every waiting sample chooses its cheapest micro-batch. If too many choose one, those with the largest
// regret, the cost of their second choice minus the first, get a place. The others choose again. Each round but the last
// fills a micro-batch, so at most M rounds are needed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace fusedrec {

//   cost    [n * M]  cost of sample i in micro-batch m, at i * M + m
//   places  [M]      free places, with sum n
// Returns the micro-batch of each sample, [n].
inline std::vector<int32_t> Assign(const std::vector<int64_t>& cost, std::vector<int64_t> places) {
  struct Choice {
    int64_t sample, best, regret;
  };
  constexpr int64_t kClosed = std::numeric_limits<int64_t>::max();
  const int64_t num_parts = places.size();
  std::vector<int32_t> found(cost.size() / num_parts);
  std::vector<int64_t> waiting(found.size());
  std::iota(waiting.begin(), waiting.end(), 0);
  std::vector<Choice> choices;
  while (!waiting.empty()) {
    choices.clear();
    for (const int64_t sample : waiting) {
      int64_t best = 0, first = kClosed, second = kClosed;
      for (int64_t m = 0; m < num_parts; ++m) {
        if (places[m] == 0) continue;
        const int64_t offer = cost[sample * num_parts + m];
        if (offer < first) {
          second = first;
          first = offer;
          best = m;
        } else if (offer < second) {
          second = offer;
        }
      }
      choices.push_back({sample, best, second == kClosed ? 0 : second - first});
    }
    std::stable_sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
      return a.best != b.best ? a.best < b.best : a.regret > b.regret;
    });
    waiting.clear();
    for (const Choice& choice : choices) {
      if (places[choice.best] > 0) {
        --places[choice.best];
        found[choice.sample] = static_cast<int32_t>(choice.best);
      } else {
        waiting.push_back(choice.sample);
      }
    }
    std::sort(waiting.begin(), waiting.end());
  }
  return found;
}

}  // namespace fusedrec
