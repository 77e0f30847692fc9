#include "hash_table/cpu/parts/evictor.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "hash_table/cpu/parts/victims.h"

namespace fusedrec {

namespace {

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
  return absl::ResourceExhaustedError(absl::StrCat(
      "max_rows_per_rank of ", rows_->spec().NameOf(segment), " is ", limits.max_rows, ", but a batch needs ", excess - gone,
      " rows more while the rows of the last ", rows_->spec().window,
      " lookups, and rows whose gradients wait, may not leave",
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
  if (!expired.empty()) rows_->pins().NoteMove(pins.now);
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

}  // namespace fusedrec
