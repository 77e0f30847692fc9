// The tier below memory: rows beyond memory_budget lie in a file (FusedRec, section 4; NestPipe, section IV).
//
// A lookup brings the rows that it needs into memory (MoveRow), where they are trained. The coldest rows go back. Rows
// move bit by bit, so a table that spills trains exactly like a table that does not.
#include <sys/mman.h>

#include <vector>

#include "common/hash.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cpu/reader.h"
#include "hash_table/cpu/victims.h"

namespace fusedrec {

absl::StatusOr<int64_t> HashTable::DemoteColdest(int64_t count) {
  int64_t gone = 0;
  // Repeats when another lookup has touched some of the coldest rows meanwhile.
  while (gone < count) {
    const auto more = DemoteColdestOnce(count - gone);
    if (!more.ok()) return more;
    if (*more < 0) break;
    gone += *more;
  }
  return gone;
}

absl::StatusOr<int64_t> HashTable::DemoteColdestOnce(int64_t count) {
  const Pins pins = CurrentPins();
  std::vector<Victim> victims;
  for (int s = 0; s < kShards; ++s) {
    std::lock_guard<std::mutex> lock(shards_[s].mutex);
    for (int64_t segment = 0; segment < segments(); ++segment) {
      ForEachRow(shards_[s], segment, [&](int64_t id, uint32_t handle, const RowHeader& header) {
        if (RowStore::PoolOf(handle) == 1 || pins.Hold(header)) return;
        victims.push_back({header.last, TableHash(id), id, s, static_cast<int32_t>(segment)});
      });
    }
  }
  if (victims.empty()) return -1;
  KeepWorst(&victims, count);
  NoteMove(pins.now);
  int64_t gone = 0;
  for (const Victim& victim : victims) {
    Shard* shard = &shards_[victim.shard];
    std::lock_guard<std::mutex> lock(shard->mutex);
    uint32_t handle = shard->keys[victim.segment].Find(victim.id, TableHash(victim.id));
    if (handle == kAbsent || RowStore::PoolOf(handle) == 1) continue;  // another lookup was faster
    if (pins.Hold(*rows_.Header(handle))) continue;
    const absl::Status moved = MoveRow(shard, victim.segment, victim.id, 1, &handle);
    if (!moved.ok()) return moved;
    ++gone;
  }
  return gone;
}

void HashTable::Prefetch(const Message& message) const {
  if (memory_rows_ == 0) return;
  constexpr uintptr_t kPage = 4096;
  Reader reader(this);
  int64_t entry = 0;
  for (const int32_t size : message.source_splits) {
    const int64_t* id = &message.entries[entry] + segments();
    for (int64_t segment = 0; segment < segments(); ++segment) {
      for (int64_t i = message.entries[entry + segment]; i > 0; --i, ++id) {
        const uint64_t hash = TableHash(*id);
        const uint32_t handle = shards_[ShardOf(hash)].keys[segment].Find(*id, hash);
        if (handle == kAbsent || RowStore::PoolOf(handle) == 0) continue;
        const uintptr_t row = reinterpret_cast<uintptr_t>(rows_.Row(handle)), page = row / kPage * kPage;
        madvise(reinterpret_cast<void*>(page), row - page + format(1).stride(), MADV_WILLNEED);
      }
    }
    entry += size;
  }
}

}  // namespace fusedrec
