#include "hash_table/cpu/parts/tiers.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/hash.h"
#include "hash_table/cpu/parts/victims.h"

namespace fusedrec {

namespace {

constexpr size_t kAhead = 16;  // rows between the fetch of a header and its use

bool IsInMemory(int64_t, int64_t, uint32_t handle) { return RowStore::PoolOf(handle) == 0; }

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

int64_t FileTier::memory_rows() const {
  return std::max<int64_t>(rows_->spec().memory_budget / rows_->format(0).stride(), 1);
}

int64_t FileTier::ExcessWith(int64_t new_rows) const {
  return is_on() ? rows_->store().size(0) + new_rows - memory_rows() : 0;
}

absl::Status FileTier::Full(int64_t lacking) const {
  return absl::ResourceExhaustedError(absl::StrCat(
      "memory_budget_per_rank holds ", memory_rows(), " rows, but a batch needs ", lacking, " more while the rows of the ",
      "last ", rows_->spec().window, " lookups, and rows whose gradients wait, stay in memory. Remedy: a larger ",
      "memory_budget_per_rank, or smaller batches."));
}

absl::Status FileTier::RequireRoom(int64_t new_rows) const {
  const int64_t excess = ExcessWith(new_rows);
  if (excess <= 0) return absl::OkStatus();
  const int64_t can_go = CountThatMayGo(rows_, 0, rows_->segments() - 1, excess, IsInMemory);
  return can_go >= excess ? absl::OkStatus() : Full(excess - can_go);
}

absl::Status FileTier::MakeRoom(int64_t new_rows) {
  const int64_t excess = ExcessWith(new_rows);
  if (excess <= 0) return absl::OkStatus();
  const auto score = [](const RowHeader& header) { return header.last; };
  const auto take = [&](Shard* shard, int64_t segment, int64_t id, uint32_t handle) {
    return rows_->MoveRow(shard, segment, id, 1, &handle);
  };
  const int64_t more = memory_rows() / 16;  // so that not every step has to scan
  const auto gone = TakeLowest(rows_, 0, rows_->segments() - 1, excess + more, IsInMemory, score, take);
  if (!gone.ok()) return gone.status();
  return *gone >= excess ? absl::OkStatus() : Full(excess - *gone);
}

void FileTier::Prefetch(const Message& message) const {
  if (!is_on()) return;
  constexpr uintptr_t kPage = 4096;
  const ShardedRows::Reader reader(rows_);
  int64_t entry = 0;
  for (const int32_t size : message.source_splits) {
    const int64_t* id = &message.entries[entry] + rows_->segments();
    for (int64_t segment = 0; segment < rows_->segments(); ++segment) {
      for (int64_t i = message.entries[entry + segment]; i > 0; --i, ++id) {
        const uint64_t hash = TableHash(*id);
        const uint32_t handle = rows_->ShardWith(hash).keys[segment].Find(*id, hash);
        if (handle == kAbsent || RowStore::PoolOf(handle) == 0) continue;
        const uintptr_t row = reinterpret_cast<uintptr_t>(rows_->Row(handle)), page = row / kPage * kPage;
        madvise(reinterpret_cast<void*>(page), row - page + rows_->format(1).stride(), MADV_WILLNEED);
      }
    }
    entry += size;
  }
}

}  // namespace fusedrec
