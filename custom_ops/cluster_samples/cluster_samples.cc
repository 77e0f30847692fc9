#include "cluster_samples/cluster_samples.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "common/hash.h"
#include "common/limits.h"
#include "common/try.h"

namespace fusedrec {
namespace {

// The settings were tuned on batches of three logs. Results depend little on them.
constexpr int64_t kSweeps = 30;                             // number of times that every sample is placed
constexpr int64_t kUnit = int64_t{1} << 26;                 // one id, in units of cost
constexpr int64_t kFirstWeight = 950, kLastWeight = 20;     // weight of copies against presence, in thousandths
constexpr int64_t kMaxBlock = 256;                          // samples placed at once, which do not see each other
constexpr int64_t kMinBlocks = 16;                          // blocks per sweep, if the batch has enough samples
constexpr int64_t kReach = 10;                              // neighbours are shuffled over 1 / kReach of the samples
constexpr double kPriceStep = 0.05 * kUnit;                 // price of a token, per block, at twice the share of tokens
constexpr int64_t kMostPrice = 16 * kUnit;                  // so that no product with tokens overflows
constexpr int64_t kMostChained = 64;                        // micro-batches that change places; the time grows as M^2

// A cheap assignment of n samples to n places in micro-batches.
//
// In each round every waiting sample chooses its cheapest micro-batch. If too many choose one, those with the largest
// regret, the cost of their second choice minus the first, get a place. The others choose again. Each round but the last
// fills a micro-batch, so at most M rounds are needed.
//   cost    [n * M]  cost of sample i in micro-batch m, at i * M + m
//   places  [M]      free places, with sum n
// Returns the micro-batch of each sample, [n].
std::vector<int32_t> Assign(const std::vector<int64_t>& cost, std::vector<int64_t> places) {
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
    std::stable_sort(choices.begin(), choices.end(),
        [](const Choice& a, const Choice& b) { return a.best != b.best ? a.best < b.best : a.regret > b.regret; });
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

// A stream of random 64-bit numbers: the hash of a counter.
class Random {
 public:
  uint64_t operator()() { return Mix64(++drawn_ * 0x9e3779b97f4a7c15ULL); }

 private:
  uint64_t drawn_ = 0;
};

template <typename Key>
std::vector<int64_t> Argsort(const std::vector<Key>& keys) {
  std::vector<int64_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return keys[a] < keys[b]; });
  return order;
}

// The shared ids of each sample, numbered from 0: sample b has ids[splits[b]:splits[b+1]], each once. Ids of a single
// sample are left out, because their cost is fixed.
struct Links {
  std::vector<int32_t> ids;
  std::vector<int64_t> splits;
  int64_t num_ids = 0;
};

Links LinkSamples(const std::vector<FeatureIds>& features, int64_t samples) {
  struct Link {
    int64_t table, id;
    int32_t sample;
    auto Key() const { return std::tie(table, id, sample); }
    bool SameRow(const Link& other) const { return table == other.table && id == other.id; }
  };
  std::vector<Link> all;
  for (const FeatureIds& feature : features) {
    for (int64_t b = 0; b < samples; ++b) {
      for (int64_t n = feature.splits[b]; n < feature.splits[b + 1]; ++n) {
        all.push_back({feature.table, feature.ids[n], static_cast<int32_t>(b)});
      }
    }
  }
  std::sort(all.begin(), all.end(), [](const Link& a, const Link& b) { return a.Key() < b.Key(); });
  all.erase(std::unique(all.begin(), all.end(), [](const Link& a, const Link& b) { return a.Key() == b.Key(); }),
            all.end());

  Links links;
  links.splits.assign(samples + 1, 0);
  std::vector<std::pair<int32_t, int32_t>> kept;  // number of the id, sample
  for (size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    while (end < all.size() && all[end].SameRow(all[begin])) ++end;
    if (end - begin == 1) continue;
    for (size_t n = begin; n < end; ++n) {
      kept.emplace_back(links.num_ids, all[n].sample);
      ++links.splits[all[n].sample + 1];
    }
    ++links.num_ids;
  }
  for (int64_t b = 0; b < samples; ++b) links.splits[b + 1] += links.splits[b];
  links.ids.resize(kept.size());
  std::vector<int64_t> next(links.splits.begin(), links.splits.end() - 1);
  for (const auto& [id, sample] : kept) links.ids[next[sample]++] = id;
  return links;
}

// Deals samples like cards, in alternating directions, so that neighbours in tokens go to different micro-batches. A
// micro-batch of half the size gets a sample half as often.
std::vector<int32_t> Deal(const std::vector<int64_t>& by_tokens, absl::Span<const int64_t> sizes) {
  std::vector<std::tuple<double, int64_t, int32_t>> places;  // when it is dealt, order at that time, micro-batch
  for (size_t m = 0; m < sizes.size(); ++m) {
    const int64_t piece = m;
    for (int64_t turn = 0; turn < sizes[m]; ++turn) {
      places.emplace_back((turn + 0.5) / sizes[m], turn % 2 ? -piece : piece, m);
    }
  }
  std::sort(places.begin(), places.end());
  std::vector<int32_t> part(by_tokens.size());
  for (size_t n = 0; n < by_tokens.size(); ++n) part[by_tokens[n]] = std::get<2>(places[n]);
  return part;
}

// The state of the search: a partition, the copies of every id and the tokens in each micro-batch.
class Search {
 public:
  Search(const Links& links, const std::vector<int64_t>& tokens, absl::Span<const int64_t> sizes,
         std::vector<int32_t>* part)
      : links_(links), tokens_(tokens), part_(*part), num_parts_(sizes.size()), copies_(links.num_ids * num_parts_),
        load_(num_parts_), share_(num_parts_), price_(num_parts_) {
    const int64_t total = std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
    for (int64_t m = 0; m < num_parts_; ++m) {
      share_[m] = std::max(1.0, static_cast<double>(total * sizes[m]) / static_cast<double>(tokens.size()));
    }
    for (size_t b = 0; b < tokens.size(); ++b) Count(b, +1);
  }

  // Reassigns the chosen samples to the places that they hold together. id_cost[n] is the cost of an id in a
  // micro-batch where n samples have it. Random numbers break ties: else all would take the first micro-batch.
  void Place(absl::Span<const int64_t> chosen, const std::vector<int64_t>& id_cost, Random* random) {
    const int64_t most = id_cost.size() - 1;
    std::vector<int64_t> places(num_parts_, 0), cost(chosen.size() * num_parts_, 0);
    int64_t of_all = 0;
    for (const int64_t b : chosen) {
      ++places[part_[b]];
      of_all += tokens_[b];
      Count(b, -1);
    }
    const double mean = static_cast<double>(of_all) / static_cast<double>(chosen.size());
    for (size_t n = 0; n < chosen.size(); ++n) {
      const int64_t b = chosen[n];
      int64_t* of_sample = &cost[n * num_parts_];
      for (int64_t l = links_.splits[b]; l < links_.splits[b + 1]; ++l) {
        const int32_t* copies = &copies_[links_.ids[l] * num_parts_];
        for (int64_t m = 0; m < num_parts_; ++m) of_sample[m] += id_cost[std::min<int64_t>(copies[m], most)];
      }
      for (int64_t m = 0; m < num_parts_; ++m) {
        const double price_of_tokens = (static_cast<double>(tokens_[b]) - mean) * static_cast<double>(price_[m]);
        of_sample[m] += static_cast<int64_t>(std::floor(price_of_tokens)) + static_cast<int64_t>((*random)() >> 58);
      }
    }
    const std::vector<int32_t> found = Assign(cost, places);
    for (size_t n = 0; n < chosen.size(); ++n) {
      part_[chosen[n]] = found[n];
      Count(chosen[n], +1);
    }
    for (int64_t m = 0; m < num_parts_; ++m) {
      const double above = static_cast<double>(load_[m]) / share_[m] - 1;
      price_[m] += static_cast<int64_t>(std::floor(above * kPriceStep));
      price_[m] = std::clamp(price_[m], -kMostPrice, kMostPrice);
    }
  }

  // Gives each place to the micro-batch of its size that shares most ids with the one before, and renumbers the samples.
  void Chain(absl::Span<const int64_t> sizes) {
    std::vector<int32_t> place_of(num_parts_, -1);
    place_of[0] = 0;
    int64_t before = 0;
    for (int64_t place = 1; place < num_parts_; ++place) {
      int64_t best = -1, most = -1;
      for (int64_t m = 0; m < num_parts_; ++m) {
        if (place_of[m] >= 0 || sizes[m] != sizes[place]) continue;
        const int64_t shared = SharedIds(before, m);
        if (shared > most) std::tie(best, most) = std::make_pair(m, shared);
      }
      place_of[best] = static_cast<int32_t>(place);
      before = best;
    }
    for (int32_t& part : part_) part = place_of[part];
  }

 private:
  int64_t SharedIds(int64_t one, int64_t other) const {
    int64_t shared = 0;
    for (int64_t i = 0; i < links_.num_ids; ++i) {
      shared += copies_[i * num_parts_ + one] > 0 && copies_[i * num_parts_ + other] > 0;
    }
    return shared;
  }

  void Count(int64_t b, int32_t change) {
    load_[part_[b]] += change * tokens_[b];
    for (int64_t l = links_.splits[b]; l < links_.splits[b + 1]; ++l) {
      copies_[links_.ids[l] * num_parts_ + part_[b]] += change;
    }
  }

  const Links& links_;
  const std::vector<int64_t>& tokens_;
  std::vector<int32_t>& part_;
  const int64_t num_parts_;
  std::vector<int32_t> copies_;  // of id i in micro-batch m, at i * M + m
  std::vector<int64_t> load_;
  std::vector<double> share_;
  std::vector<int64_t> price_;
};

void Sweep(int64_t number, const std::vector<int64_t>& by_tokens, int64_t block, Random* random, Search* search) {
  const int64_t samples = by_tokens.size(), last = kSweeps - 1;
  const int64_t weight = kUnit * (kFirstWeight * last - (kFirstWeight - kLastWeight) * number) / (1000 * last);
  std::vector<int64_t> id_cost{kUnit};  // up to the number of copies from which on a further one costs nothing
  for (int64_t decay = kUnit; decay > 0;) id_cost.push_back(weight * (decay = decay * 9 / 10) / kUnit);

  // Neighbours and bounds differ in every sweep, because a block only exchanges the places of its own samples.
  const int64_t reach = block + weight * samples / (kReach * kUnit);
  std::vector<int64_t> keys(samples), order(samples), bounds{0};
  for (int64_t n = 0; n < samples; ++n) keys[n] = (n << 20) + reach * static_cast<int64_t>((*random)() >> 44);
  const std::vector<int64_t> shuffled = Argsort(keys);
  for (int64_t n = 0; n < samples; ++n) order[n] = by_tokens[shuffled[n]];
  for (int64_t bound = 1 + RangeOf((*random)(), block); bound < samples; bound += block) bounds.push_back(bound);
  bounds.push_back(samples);
  std::vector<uint64_t> turns(bounds.size() - 1);
  for (uint64_t& turn : turns) turn = (*random)();
  for (const int64_t n : Argsort(turns)) {
    search->Place(absl::MakeConstSpan(order).subspan(bounds[n], bounds[n + 1] - bounds[n]), id_cost, random);
  }
}

}  // namespace

absl::Status ClusterSamples(const std::vector<FeatureIds>& features, absl::Span<const int64_t> sizes,
                            absl::Span<int64_t> order) {
  const int64_t samples = order.size(), micro_batches = sizes.size();
  std::vector<int64_t> tokens(samples, 0), descending(samples);
  for (const FeatureIds& feature : features) {
    for (int64_t b = 0; b < samples; ++b) tokens[b] += feature.splits[b + 1] - feature.splits[b];
  }
  for (int64_t b = 0; b < samples; ++b) descending[b] = -tokens[b];
  const std::vector<int64_t> by_tokens = Argsort(descending);
  std::vector<int32_t> part = Deal(by_tokens, sizes);
  const Links links = LinkSamples(features, samples);
  if (micro_batches > 1 && links.num_ids > 0) {
    FUSEDREC_TRY(RequireIn("the number of shared ids times micro-batches", links.num_ids * micro_batches, 0,
                           kMostCopies, "fewer micro-batches, or smaller batches."));
    Random random;
    Search search(links, tokens, sizes, &part);
    // A smaller block has few places to exchange.
    const int64_t block = std::max(micro_batches, std::min(kMaxBlock, samples / kMinBlocks));
    for (int64_t number = 0; number < kSweeps; ++number) Sweep(number, by_tokens, block, &random, &search);
    if (micro_batches <= kMostChained) search.Chain(sizes);
  }
  const std::vector<int64_t> found = Argsort(part);
  std::copy(found.begin(), found.end(), order.begin());
  return absl::OkStatus();
}

}  // namespace fusedrec
