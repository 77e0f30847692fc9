#include "hash_table/cpu/parts/demoter.h"

#include <mutex>
#include <utility>
#include <vector>

namespace fusedrec {
namespace {

constexpr size_t kAhead = 16;  // rows between the fetch of a header and its use

}  // namespace

absl::Status Demoter::DemoteCold(uint32_t clock) {
  if (rows_->spec().hot_after == 0) return absl::OkStatus();
  for (int64_t segment = 0; segment < rows_->segments(); ++segment) {
    const Shards due = rows_->limits(segment).DemotedAt(clock);
    for (int64_t s = due.begin; s < due.end; ++s) {
      const absl::Status demoted = DemoteIn(&rows_->shards()[s], segment, clock, rows_->pins().Current());
      if (!demoted.ok()) return demoted;
    }
  }
  return absl::OkStatus();
}

absl::Status Demoter::DemoteIn(Shard* shard, int64_t segment, uint32_t clock, const Pins& pins) {
  const Limits& limits = rows_->limits(segment);
  std::lock_guard<std::mutex> lock(shard->mutex);
  KeyIndex& keys = shard->keys[segment];
  std::vector<std::pair<int64_t, uint32_t>> wide;  // ids and handles of float32 rows
  keys.ForEach([&](int64_t id, uint32_t handle) {
    if (RowStore::PoolOf(handle) == 0) wide.emplace_back(id, handle);
  });
  for (size_t i = 0; i < wide.size(); ++i) {
    if (i + kAhead < wide.size()) __builtin_prefetch(rows_->Row(wide[i + kAhead].second));
    auto [id, handle] = wide[i];
    const RowHeader& header = *rows_->Header(handle);  // not copied: an update may be writing `updated`
    const int64_t count = limits.CountAt(header.count, header.last, clock);
    if (count >= rows_->spec().hot_after || pins.Hold(header)) continue;
    const uint32_t last = header.last;
    rows_->pins().NoteMove(pins.now);
    const absl::Status moved = rows_->MoveRow(shard, segment, id, 1, &handle);
    if (!moved.ok()) return moved;
    // The rounding has changed the row, which a delta checkpoint must know.
    rows_->Header(handle)->updated = rows_->version();
    rows_->change_log().Touch(&shard->changes, segment, id, last, keys.size());
  }
  return absl::OkStatus();
}

}  // namespace fusedrec
