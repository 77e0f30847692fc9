// A key is found wherever its probing led, and probing reaches every line: for every number of lines, and for hashes
// whose step is as odd as it can be. (MTGRBoost, theorem 1)
//
// An index is filled to the last place, far beyond the load at which it would grow. Then one place is freed, anywhere,
// and a key with the hash in question must come to lie there: had its steps passed the line by, Insert would go on for
// ever. Find looks at as many lines as there are and no more, so it finds the key only if no line was visited twice.
#include <random>
#include <vector>

#include "check.h"
#include "hash_table/cpu/rows/key_index.h"

namespace fusedrec {
namespace {

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

TEST(key_index_probing) {
  std::mt19937_64 random(1);
  for (int64_t lines = 1; lines <= 4096; lines *= 2) fusedrec::EveryLineIsReached(lines, &random);
}
