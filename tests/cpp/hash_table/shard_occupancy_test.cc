// The shard of an id does not depend on its rank. On every rank of 1 to 8 and for any ids, the 64 shards fill evenly,
// and so do the lines inside a shard.
#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "common/hash.h"
#include "hash_table/cpu/hash_table.h"

namespace fusedrec {
namespace {

constexpr int kBins = 64;

// Pearson's statistic of counts that should be equal: kBins - 1 = 63 degrees of freedom, so mean 63 and standard
// deviation sqrt(2 * 63) = 11.2 if they are. Six deviations above is 130; below 20 they would be too even for chance.
void CheckEven(const std::vector<int64_t>& counts, const std::string& what) {
  int64_t total = 0;
  for (const int64_t count : counts) total += count;
  const double mean = static_cast<double>(total) / kBins;
  CHECK(mean > 50, "too few ids to judge ", what);
  double statistic = 0;
  for (const int64_t count : counts) statistic += (count - mean) * (count - mean) / mean;
  CHECK(statistic > 20 && statistic < 130, "chi-square ", statistic, " of ", what);
}

struct Pattern {
  std::string name;
  std::function<int64_t(int64_t)> id;
};

std::vector<int64_t> Drawn(int count) {
  std::mt19937_64 random(3);
  std::vector<int64_t> ids(count);
  for (int64_t& id : ids) id = static_cast<int64_t>(random());
  return ids;
}

std::vector<Pattern> Patterns() {
  std::vector<Pattern> patterns = {
      {"in sequence", [](int64_t i) { return i; }},
      {"below zero", [](int64_t i) { return -1 - i; }},
      {"in steps of 1000", [](int64_t i) { return 1000 * i; }},
      {"random", [drawn = Drawn(4096 * 8)](int64_t i) { return drawn[i]; }},
  };
  for (const int power : {1, 6, 16, 26, 32, 40, 45}) {
    patterns.push_back({absl::StrCat("multiples of 2^", power), [power](int64_t i) { return i << power; }});
  }
  return patterns;
}

void ShardsFillEvenly(const Pattern& pattern, int ranks) {
  std::vector<std::vector<int64_t>> shards(ranks, std::vector<int64_t>(kBins)), lines = shards;
  for (int64_t i = 0; i < 4096 * ranks; ++i) {
    const int64_t id = pattern.id(i);
    const uint64_t hash = TableHash(id);
    const int rank = HashRangeOwner(id, ranks);
    ++shards[rank][ShardOf(hash)];
    ++lines[rank][hash % kBins];
  }
  for (int rank = 0; rank < ranks; ++rank) {
    CheckEven(shards[rank], absl::StrCat("the shards of rank ", rank, " of ", ranks, ", ids ", pattern.name));
    CheckEven(lines[rank], absl::StrCat("the lines of rank ", rank, " of ", ranks, ", ids ", pattern.name));
  }
}

// Inside one shard of one rank the lines fill evenly too.
void LinesOfAShardFillEvenly(const Pattern& pattern, uint32_t ranks) {
  std::vector<int64_t> lines(kBins);
  for (int64_t i = 0; i < 4096 * kBins * ranks; ++i) {
    const int64_t id = pattern.id(i);
    const uint64_t hash = TableHash(id);
    if (HashRangeOwner(id, ranks) == ranks - 1 && ShardOf(hash) == 5) ++lines[hash % kBins];
  }
  CheckEven(lines, absl::StrCat("the lines of shard 5 on the last rank of ", ranks, ", ids ", pattern.name));
}

}  // namespace
}  // namespace fusedrec

TEST(shard_occupancy) {
  using namespace fusedrec;
  static_assert(kShards == kBins);
  for (const Pattern& pattern : Patterns()) {
    for (int ranks = 1; ranks <= 8; ++ranks) ShardsFillEvenly(pattern, ranks);
  }
  for (const uint32_t ranks : {1, 3}) LinesOfAShardFillEvenly(Patterns()[0], ranks);
}
