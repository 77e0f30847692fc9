#include "hash_table/cpu/parts/eviction.h"

#include <sys/mman.h>

#include <chrono>

#include "common/hash.h"
#include "hash_table/cpu/parts/message_runs.h"

namespace fusedrec {
namespace {

// The choice of the rows that leave a table or its memory: a scan finds the rows of lowest rank.

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
    rows->pins().NoteMove(pins);
    for (const Victim& victim : victims) {
      Shard* shard = &rows->shards()[victim.shard];
      std::lock_guard<std::mutex> lock(shard->mutex);
      const uint32_t handle = shard->keys[victim.segment].Find(victim.id, TableHash(victim.id));
      if (handle == kAbsent || pins.Hold(*rows->Header(handle)) || !may_go(victim.segment, victim.id, handle)) continue;
      FUSEDREC_TRY(take(shard, victim.segment, victim.id, handle));
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

// Whether a row is none of those that a lookup is about to move into memory.
auto IsNoneOf(const WaitingIds& waiting) {
  return [&waiting](int64_t segment, int64_t id, uint32_t handle) {
    return RowStore::PoolOf(handle) == 0 || !std::binary_search(waiting.begin(), waiting.end(), std::pair(segment, id));
  };
}

std::atomic<int64_t> minute_of_tests{-1};

int64_t MinuteNow() {
  const int64_t set = minute_of_tests.load();
  if (set >= 0) return set;
  return std::chrono::duration_cast<std::chrono::minutes>(std::chrono::system_clock::now().time_since_epoch()).count();
}

constexpr size_t kAhead = 16;  // rows between the fetch of a header and its use

bool IsInMemory(int64_t, int64_t, uint32_t handle) { return RowStore::PoolOf(handle) == 0; }

}  // namespace

// For tests, which do not wait: the minute that the tables of this process see; -1: that of the system's clock.
extern "C" __attribute__((visibility("default"))) void fusedrec_set_minute(int64_t minute) { minute_of_tests = minute; }

absl::Status Evictor::MakeRoom(int64_t segment, int64_t new_ids, const WaitingIds& waiting, bool evicts) {
  const Limits& limits = rows_->limits(segment);
  if (limits.max_rows == 0) return absl::OkStatus();
  const int64_t excess = rows_->size(segment) + new_ids - limits.max_rows;
  if (excess <= 0) return absl::OkStatus();
  int64_t gone = 0;
  if (evicts && (limits.exact_eviction || limits.max_rows <= kFewRows)) {
    gone = EvictWorst(segment, excess + limits.max_rows / 16, waiting);
  } else if (evicts) {
    gone = EvictInParts(segment, excess, waiting);
  } else if (limits.eviction != Eviction::kNone) {
    gone = CountThatMayGo(rows_, segment, segment, excess, IsNoneOf(waiting));
  }
  if (gone >= excess) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("max_rows_per_rank of ", rows_->spec().NameOf(segment), " is ",
      limits.max_rows, ", but a batch needs ", excess - gone, " rows more while the rows of the last ",
      rows_->pins().Current().window, " lookups, and rows whose gradients wait, may not leave",
      limits.eviction == Eviction::kNone && limits.ttl == 0 ? " and eviction is 'none'" : "",
      ". The table is what it was. Remedy: a larger max_rows_per_rank, an eviction policy, or smaller batches."));
}

int64_t Evictor::EvictWorst(int64_t segment, int64_t count, const WaitingIds& waiting) {
  return EvictLowest(segment, count, waiting, {0, kParts});
}

int64_t Evictor::EvictInParts(int64_t segment, int64_t count, const WaitingIds& waiting) {
  const int64_t of_part = std::max<int64_t>(rows_->size(segment) / kParts / 16, 1);  // rows of a part that leave
  // Reversed bits of the clock: parts that follow each other in time are far apart, and each has its turn equally often.
  const uint32_t clock = rows_->pins().clock();
  int64_t part = 0, gone = 0;
  for (int bit = 0; bit < kPartBits; ++bit) part |= int64_t{clock >> bit & 1} << (kPartBits - 1 - bit);
  for (int64_t scanned = 0; scanned < kParts && gone < count;) {
    const int64_t needed = (count - gone + of_part - 1) / of_part;
    const int64_t parts = std::min({needed, kParts - part, kParts - scanned});
    gone += EvictLowest(segment, parts * of_part, waiting, {part, part + parts});
    scanned += parts;
    part = (part + parts) % kParts;
  }
  return gone < count ? gone + EvictWorst(segment, count - gone, waiting) : gone;
}

int64_t Evictor::EvictLowest(int64_t segment, int64_t count, const WaitingIds& waiting, Parts parts) {
  const Limits& limits = rows_->limits(segment);
  if (limits.eviction == Eviction::kNone) return 0;
  const uint32_t clock = rows_->pins().clock();
  const auto score = [=](const RowHeader& header) { return limits.ScoreOf(header.count, header.last, clock); };
  const auto take = [&](Shard* shard, int64_t, int64_t id, uint32_t) {
    rows_->RemoveKey(shard, segment, id);
    ++shard->statistics[segment].evictions;
    return absl::OkStatus();
  };
  return *TakeLowest(rows_, segment, segment, count, IsNoneOf(waiting), score, take, parts);
}

void Evictor::NoteMinute(uint32_t clock) {
  if (most_minutes_ == 0) return;
  const int64_t now = MinuteNow();
  std::lock_guard<std::mutex> lock(minutes_mutex_);
  if (!minutes_.empty() && clock < minutes_.back().first_clock) minutes_.clear();  // a load has set the clock back
  // Rows of before the first lookup, which a load has brought, count as looked up by it.
  if (minutes_.empty()) minutes_.push_back({now, 0});
  if (now <= minutes_.back().number) return;
  minutes_.push_back({now, clock});
  const auto is_before = [](const Minute& minute, int64_t number) { return minute.number < number; };
  oldest_.clear();
  for (const int64_t minutes : rows_->spec().ttl_minutes) {
    const auto kept = std::lower_bound(minutes_.begin(), minutes_.end(), now - minutes, is_before);
    oldest_.push_back(minutes == 0 ? 0 : kept->first_clock);
  }
  next_shard_ = 0;
  while (minutes_.front().number < now - most_minutes_) minutes_.pop_front();
}

bool Evictor::NextOfMinute(int* shard, std::vector<uint32_t>* oldest) {
  if (most_minutes_ == 0) return false;
  std::lock_guard<std::mutex> lock(minutes_mutex_);
  if (next_shard_ == kShards) return false;
  *shard = next_shard_++;
  *oldest = oldest_;
  return true;
}

template <typename IsOver>
int64_t Evictor::EvictExpiredIn(Shard* shard, int64_t segment, const Pins& pins, const IsOver& is_over) {
  std::lock_guard<std::mutex> lock(shard->mutex);
  std::vector<int64_t> expired;
  rows_->ForEachRow(*shard, segment, [&](int64_t id, uint32_t, const RowHeader& header) {
    if (is_over(header)) expired.push_back(id);
  });
  const int64_t scanned = shard->keys[segment].size();
  if (!expired.empty()) rows_->pins().NoteMove(pins);
  for (const int64_t id : expired) rows_->RemoveKey(shard, segment, id);
  shard->statistics[segment].evictions += expired.size();
  return scanned;
}

void Evictor::EvictExpired(uint32_t clock) {
  const std::vector<Limits>& limits = rows_->spec().limits;
  const auto expires = [clock](const Limits& of) { return !of.ExpiredAt(clock).empty(); };
  if (most_minutes_ == 0 && std::none_of(limits.begin(), limits.end(), expires)) return;
  const Pins pins = rows_->pins().Current();
  for (int64_t segment = 0; segment < rows_->segments(); ++segment) {
    const auto is_over = [&](const RowHeader& header) { return HasExpired(segment, header, pins); };
    const Shards turn = limits[segment].ExpiredAt(clock);
    for (int64_t s = turn.begin; s < turn.end; ++s) EvictExpiredIn(&rows_->shards()[s], segment, pins, is_over);
  }
  NoteMinute(clock);
  int s;
  std::vector<uint32_t> oldest;
  for (int64_t scanned = 0; scanned < kFewRows && NextOfMinute(&s, &oldest);) {
    for (int64_t segment = 0; segment < rows_->segments(); ++segment) {
      if (oldest[segment] == 0) continue;
      const auto is_too_old = [&](const RowHeader& header) { return header.last < oldest[segment] && !pins.Hold(header); };
      scanned += EvictExpiredIn(&rows_->shards()[s], segment, pins, is_too_old);
    }
  }
}

absl::Status Demoter::DemoteCold(uint32_t clock) {
  if (rows_->spec().hot_after == 0) return absl::OkStatus();
  for (int64_t segment = 0; segment < rows_->segments(); ++segment) {
    const Shards due = rows_->limits(segment).DemotedAt(clock);
    for (int64_t s = due.begin; s < due.end; ++s) {
      FUSEDREC_TRY(DemoteIn(&rows_->shards()[s], segment, clock, rows_->pins().Current()));
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
    rows_->pins().NoteMove(pins);
    FUSEDREC_TRY(rows_->MoveRow(shard, segment, id, 1, &handle));
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
      "last ", rows_->pins().Current().window, " lookups, and rows whose gradients wait, stay in memory. Remedy: a larger ",
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
  for (const MessageRun& run : RunsOf(message, rows_->segments(), message.num_ids)) {
    for (const int64_t id : message.entries.subspan(run.entry, run.count)) {
      const uint64_t hash = TableHash(id);
      const uint32_t handle = rows_->ShardWith(hash).keys[run.segment].Find(id, hash);
      if (handle == kAbsent || RowStore::PoolOf(handle) == 0) continue;
      const uintptr_t row = reinterpret_cast<uintptr_t>(rows_->Row(handle)), page = row / kPage * kPage;
      madvise(reinterpret_cast<void*>(page), row - page + rows_->format(1).stride(), MADV_WILLNEED);
    }
  }
}

}  // namespace fusedrec
