// The choice of the rows that leave a table or its memory: a scan finds the rows of lowest rank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "absl/status/statusor.h"
#include "common/hash.h"
#include "hash_table/cpu/rows/sharded_rows.h"

namespace fusedrec {

struct Victim {
  uint64_t score;  // lowest leaves first
  uint64_t tie;    // a hash of the id: the same choice in any order of the scan
  int64_t id;
  int32_t shard;
  int32_t segment;
  bool operator<(const Victim& other) const { return score != other.score ? score < other.score : tie < other.tie; }
};

// Calls take(shard, segment, id, handle) -> absl::Status for the `count` rows of segments [first, last] that rank lowest
// in these parts, under the mutex of their shard. Returns how many there were. Rows in use stay.
//   may_go(segment, id, handle)  whether the row may be taken
//   score(header) -> uint64_t    its rank
template <typename MayGo, typename Score, typename Take>
absl::StatusOr<int64_t> TakeLowest(ShardedRows* rows, int64_t first, int64_t last, int64_t count, const MayGo& may_go,
                                   const Score& score, const Take& take, Parts parts = {0, kParts}) {
  const bool all = parts.begin == 0 && parts.end == kParts;
  int64_t gone = 0;
  while (gone < count) {  // again when a lookup has touched some of the victims meanwhile
    const Pins pins = rows->pins().Current();
    std::vector<Victim> victims;
    for (int s = ShardOfPart(parts.begin); s <= ShardOfPart(parts.end - 1); ++s) {
      const Shard& shard = rows->shards()[s];
      std::lock_guard<std::mutex> lock(shard.mutex);
      for (int64_t segment = first; segment <= last; ++segment) {
        const auto add = [&](int64_t id, uint32_t handle, const RowHeader& header) {
          if (pins.Hold(header) || !may_go(segment, id, handle)) return;
          // Among equals, the lowest hash leaves first; among those of some parts, no part is first.
          const uint64_t hash = TableHash(id), tie = all ? hash : hash << kPartBits | hash >> (64 - kPartBits);
          victims.push_back({score(header), tie, id, s, static_cast<int32_t>(segment)});
        };
        rows->ForEachRow(shard, segment, add, parts);
      }
    }
    if (victims.empty()) break;
    if (count - gone < static_cast<int64_t>(victims.size())) {
      std::nth_element(victims.begin(), victims.begin() + (count - gone), victims.end());
      victims.resize(count - gone);
    }
    rows->pins().NoteMove(pins.now);
    for (const Victim& victim : victims) {
      Shard* shard = &rows->shards()[victim.shard];
      std::lock_guard<std::mutex> lock(shard->mutex);
      const uint32_t handle = shard->keys[victim.segment].Find(victim.id, TableHash(victim.id));
      if (handle == kAbsent || pins.Hold(*rows->Header(handle)) || !may_go(victim.segment, victim.id, handle)) continue;
      const absl::Status taken = take(shard, victim.segment, victim.id, handle);
      if (!taken.ok()) return taken;
      ++gone;
    }
  }
  return gone;
}

// Returns how many rows of segments [first, last] TakeLowest could take now, or some number >= `most`.
template <typename MayGo>
int64_t CountThatMayGo(ShardedRows* rows, int64_t first, int64_t last, int64_t most, const MayGo& may_go) {
  const Pins pins = rows->pins().Current();
  int64_t count = 0;
  for (int s = 0; s < kShards && count < most; ++s) {
    const Shard& shard = rows->shards()[s];
    std::lock_guard<std::mutex> lock(shard.mutex);
    for (int64_t segment = first; segment <= last; ++segment) {
      rows->ForEachRow(shard, segment, [&](int64_t id, uint32_t handle, const RowHeader& header) {
        count += !pins.Hold(header) && may_go(segment, id, handle);
        return count < most;
      });
    }
  }
  return count;
}

}  // namespace fusedrec
