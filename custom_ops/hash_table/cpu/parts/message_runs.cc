#include "hash_table/cpu/parts/message_runs.h"

#include <array>
#include <utility>

#include "common/hash.h"
#include "hash_table/cpu/rows/sharded_rows.h"

namespace fusedrec {
namespace {

constexpr int64_t kBlock = 16 * 1024;  // ids per block of the counting sort

}  // namespace

void SortByShard(const Message& message, int64_t segments, const ParallelFor& parallel_for, LookupScratch* scratch,
                 std::vector<int64_t>* shard_begin) {
  const auto shard_of = [](int64_t id) { return ShardOf(TableHash(id)); };
  const std::vector<MessageRun> pieces = RunsOf(message, segments, kBlock);  // the units of both passes
  // next[p][s]: first the ids of piece p in shard s, then, by prefix sums, where the next one of them goes.
  std::vector<std::array<int32_t, kShards>> next(pieces.size(), std::array<int32_t, kShards>{});
  const int64_t mean = pieces.empty() ? 1 : message.num_ids / static_cast<int64_t>(pieces.size()) + 1;
  parallel_for(pieces.size(), 4 * mean, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t* ids = &message.entries[pieces[p].entry];
      for (int64_t i = 0; i < pieces[p].count; ++i) ++next[p][shard_of(ids[i])];
    }
  });
  shard_begin->assign(kShards + 1, 0);
  int32_t total = 0;
  for (int s = 0; s < kShards; ++s) {
    (*shard_begin)[s] = total;
    for (std::array<int32_t, kShards>& of_piece : next) total += std::exchange(of_piece[s], total);
  }
  (*shard_begin)[kShards] = total;
  scratch->MakeRoomFor(total);
  parallel_for(pieces.size(), 8 * mean, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t* ids = &message.entries[pieces[p].entry];
      for (int64_t i = 0; i < pieces[p].count; ++i) {
        const int32_t place = next[p][shard_of(ids[i])]++;
        const int64_t position = pieces[p].position + i;
        scratch->items[place] = {ids[i], static_cast<uint32_t>(position), static_cast<uint32_t>(pieces[p].segment)};
        scratch->place[position] = place;
      }
    }
  });
}

}  // namespace fusedrec
