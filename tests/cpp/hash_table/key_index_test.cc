// KeyIndex against std::unordered_map: random insertions, removals, replacements, reservations and clearings.
#include <limits>
#include <random>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "common/hash.h"
#include "hash_table/cpu/rows/key_index.h"

namespace fusedrec {
namespace {

using Model = std::unordered_map<int64_t, uint32_t>;

// Keys whose home is the same line as long as there are at most 2^bits of them: long probings, many marks.
std::vector<int64_t> Colliding(int count, int bits) {
  std::vector<int64_t> keys;
  for (int64_t key = 0; static_cast<int>(keys.size()) < count; ++key) {
    if ((TableHash(key) & ((uint64_t{1} << bits) - 1)) == 7) keys.push_back(key);
  }
  return keys;
}

std::vector<int64_t> Ordinary(int count, std::mt19937_64* random) {
  std::vector<int64_t> keys = {std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(), -1, 0, 1};
  while (static_cast<int>(keys.size()) < count) keys.push_back(static_cast<int64_t>((*random)()));
  return keys;
}

void CheckAll(const KeyIndex& index, const Model& model, const std::vector<int64_t>& keys) {
  CHECK_EQ(index.size(), static_cast<int64_t>(model.size()));
  for (const int64_t key : keys) {
    const auto known = model.find(key);
    CHECK_EQ(index.Find(key, TableHash(key)), known == model.end() ? kAbsent : known->second, "key ", key);
  }
  Model seen;
  index.ForEach([&](int64_t key, uint32_t payload) { CHECK(seen.emplace(key, payload).second, "twice: ", key); });
  CHECK(seen == model);
}

// `busy`: how many of the keys are there at a time, roughly, in 16ths.
void RandomOperations(const std::vector<int64_t>& keys, double stagger, unsigned busy, std::mt19937_64* random) {
  KeyIndex index(stagger);
  KeyIndex::Retired retired;
  Model model;
  for (int step = 0; step < 12'000; ++step) {
    const int64_t key = keys[(*random)() % keys.size()];
    const uint64_t hash = TableHash(key);
    const uint32_t payload = static_cast<uint32_t>((*random)()) >> 1;
    const bool there = model.count(key) != 0;
    if ((*random)() % 16 < busy) {
      if (there) {
        index.Replace(key, hash, payload);
      } else {
        CHECK_OK(index.Reserve(1, &retired));
        index.Insert(key, hash, payload);
      }
      model[key] = payload;
    } else {
      CHECK_EQ(index.Remove(key, hash), there ? model[key] : kAbsent, "key ", key);
      model.erase(key);
    }
    if (step % 50 == 0) CHECK_OK(index.Reserve((*random)() % 100, &retired));
    if (step % 64 == 0) retired.clear();
    if (step % 5000 == 4999) {
      index.Clear(&retired);
      model.clear();
    }
    if (step % 500 == 0) CheckAll(index, model, keys);
  }
  CheckAll(index, model, keys);
}

// Keys that come and go must not fill the lines with marks that send every search on: the number of lines stays.
void WornLinesAreRenewed() {
  KeyIndex index;
  KeyIndex::Retired retired;
  CHECK_OK(index.Reserve(600, &retired));
  const size_t bytes = index.bytes();
  for (int64_t round = 0; round < 200; ++round) {
    CHECK_OK(index.Reserve(600, &retired));
    for (int64_t key = 600 * round; key < 600 * (round + 1); ++key) index.Insert(key, TableHash(key), 1);
    for (int64_t key = 600 * round; key < 600 * (round + 1); ++key) CHECK_EQ(index.Remove(key, TableHash(key)), 1u);
  }
  CHECK_EQ(index.bytes(), bytes);
  CHECK(!retired.empty(), "no line was ever renewed");
}

struct Key {
  int64_t key;
  uint64_t hash;
};

std::vector<uint64_t> Hashes(std::mt19937_64* random) {
  std::vector<uint64_t> hashes = {0, 1, ~uint64_t{0}, uint64_t{1} << 63, uint64_t{1} << 32, 0xffffffff, 0xffffffff00000000,
                                  0x5555555555555555, 0xaaaaaaaaaaaaaaaa};
  for (int bit = 0; bit < 64; bit += 3) hashes.push_back(uint64_t{1} << bit);
  for (int i = 0; i < 20; ++i) hashes.push_back((*random)());
  return hashes;
}

// A key is found wherever its probing led, and probing reaches every line: for every number of lines, and for hashes
// whose step is as odd as it can be. (MTGRBoost, theorem 1)
//
// An index is filled to the last place, far beyond the load at which it would grow. Then one place is freed, anywhere,
// and a key with the hash in question must come to lie there: had its steps passed the line by, Insert would go on for
// ever. Find looks at as many lines as there are and no more, so it finds the key only if no line was visited twice.
void EveryLineIsReached(int64_t lines, std::mt19937_64* random) {
  KeyIndex index;
  KeyIndex::Retired retired;
  CHECK_OK(index.Reserve(3 * lines, &retired));
  CHECK_EQ(index.bytes(), static_cast<size_t>(64 * lines));
  std::vector<Key> keys;
  for (int64_t key = 0; key < KeyIndex::kKeysPerLine * lines; ++key) {
    keys.push_back({key, (*random)()});
    index.Insert(key, keys.back().hash, static_cast<uint32_t>(key));
  }
  for (const Key& key : keys) CHECK_EQ(index.Find(key.key, key.hash), static_cast<uint32_t>(key.key));

  int64_t next = keys.size();
  for (const uint64_t hash : Hashes(random)) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      Key& place = keys[(*random)() % keys.size()];
      CHECK_EQ(index.Find(next, hash), kAbsent);
      CHECK_EQ(index.Remove(place.key, place.hash), static_cast<uint32_t>(place.key));
      CHECK_EQ(index.Find(place.key, place.hash), kAbsent);
      place = {next++, hash};
      index.Insert(place.key, hash, static_cast<uint32_t>(place.key));
      CHECK_EQ(index.Find(place.key, hash), static_cast<uint32_t>(place.key), "lines ", lines, ", hash ", hash);
    }
  }
  for (const Key& key : keys) CHECK_EQ(index.Find(key.key, key.hash), static_cast<uint32_t>(key.key));
  CHECK_EQ(index.size(), static_cast<int64_t>(keys.size()));
}

}  // namespace
}  // namespace fusedrec

TEST(key_index) {
  using namespace fusedrec;
  std::mt19937_64 random(2);
  for (const double stagger : {0.0, 0.5, 0.99}) {
    for (const unsigned busy : {6u, 10u, 15u}) {
      RandomOperations(Ordinary(700, &random), stagger, busy, &random);
      RandomOperations(Colliding(60, 10), stagger, busy, &random);
    }
  }
  WornLinesAreRenewed();
  for (int64_t lines = 1; lines <= 4096; lines *= 2) EveryLineIsReached(lines, &random);
}
