// The training lookup; hash_table.h says how it goes.
#include <algorithm>
#include <tuple>
#include <utility>

#include "common/hash.h"
#include "hash_table/cpu/hash_table.h"

namespace fusedrec {
namespace {

constexpr int kAhead = 16;             // ids between the fetch of a line of keys, that of a row, and its copy
constexpr int kRing = 2 * kAhead;      // ids under way
static_assert((kRing & (kRing - 1)) == 0, "the ring is indexed by a mask");

}  // namespace

HashTable::Pins HashTable::CurrentPins() const {
  RunningLookups::Now now = lookups_.now();
  return {now.clock, waiting_since_.load(), spec_.window, std::move(now.running)};
}

struct HashTable::Visit {
  Shard* shard;
  LookupScratch* scratch;
  int64_t begin, end;  // places of this shard's items
  uint32_t clock;
  const Pins* pins;
  RowSink rows;
  const Ahead* ahead;             // null: there was none
  std::vector<int64_t> handles;   // by number inside this shard
  std::vector<ReceivedId> fresh;        // without a row
  std::vector<ReceivedId> moving;       // whose row must move to pool 0 first
  std::vector<int64_t> num_fresh; // ids of `fresh` by segment; distinct ones where there is a limit
};

// Writes the row of an id to the lookup's result if `write` asks for it. Returns whether this lookup sees the row for the
// first time.
bool HashTable::Touch(Visit* visit, const ReceivedId& item, int64_t place, uint32_t handle, char* row, bool write) {
  RowHeader* header = RowFormat::Header(row);
  const bool first = header->last != visit->clock;
  if (first) {
    Shard* shard = visit->shard;
    change_log_.Touch(&shard->changes, item.segment, item.id, header->last, shard->keys[item.segment].size());
    header->last = visit->clock;
    header->number = static_cast<uint32_t>(visit->handles.size());
    header->count += header->count != 0xffffffff;
    visit->handles.push_back(handle);
  }
  visit->scratch->number[place] = static_cast<int32_t>(header->number);
  if (!write || visit->rows.data == nullptr) return first;
  const RowFormat& row_format = format(RowStore::PoolOf(handle));
  char* out = static_cast<char*>(visit->rows.data) +
              static_cast<int64_t>(item.position) * spec_.dim * BytesOf(visit->rows.storage);
  row_format.CopyRow(row, visit->rows.storage, out);
  return first;
}

void HashTable::VisitKnown(Visit* visit) {
  std::lock_guard<std::mutex> lock(visit->shard->mutex);
  FreeRetired(visit->shard);
  std::vector<KeyIndex>& keys = visit->shard->keys;
  const ReceivedId* items = visit->scratch->items.data() + visit->begin;
  const int64_t n = visit->end - visit->begin;
  uint64_t hashes[kRing];
  uint32_t handles[kRing];
  // Rows leave and move only under this mutex, so the look-ahead is valid for the whole shard or not used.
  const Ahead* ahead = visit->ahead != nullptr && visit->ahead->moves == moves_.load() ? visit->ahead : nullptr;
  const auto seen = [&](const ReceivedId& item) { return ahead == nullptr ? kNoRow : ahead->handles[item.position]; };
  for (int64_t i = 0; i < n + kRing; ++i) {
    if (i < n && seen(items[i]) == kNoRow) {
      const uint64_t hash = TableHash(items[i].id);
      keys[items[i].segment].Prefetch(hash);
      hashes[i & (kRing - 1)] = hash;
    }
    if (const int64_t j = i - kAhead; j >= 0 && j < n) {
      const int64_t known = seen(items[j]);
      const uint32_t handle = known != kNoRow ? static_cast<uint32_t>(known)
                                              : keys[items[j].segment].Find(items[j].id, hashes[j & (kRing - 1)]);
      handles[j & (kRing - 1)] = handle;
      if (handle != kAbsent) rows_.Fetch(handle);
    }
    const int64_t k = i - kRing;
    if (k < 0 || k >= n) continue;
    const uint32_t handle = handles[k & (kRing - 1)];
    if (handle == kAbsent) {
      visit->fresh.push_back(items[k]);
      continue;
    }
    char* row = rows_.Row(handle);
    if (RowStore::PoolOf(handle) == 1) {
      const RowHeader& header = *RowFormat::Header(row);
      const bool hot = spec_.hot_after > 0 && header.count + int64_t{1} >= spec_.hot_after &&
                       !visit->pins->Hold(header);
      if (hot || memory_rows_ > 0) {
        visit->moving.push_back(items[k]);
        continue;
      }
    }
    const bool is_there = seen(items[k]) != kNoRow && RowFormat::Header(row)->updated <= ahead->version;
    const bool first = Touch(visit, items[k], visit->begin + k, handle, row, !is_there);
    if (first) ++visit->shard->statistics[items[k].segment].hits;
  }
  if (visit->fresh.empty()) return;
  if (spec_.max_rows > 0 || memory_rows_ > 0 || spec_.admission_count > 1) {
    Admit(visit);
  } else {
    visit->num_fresh.assign(segments(), 0);
    for (const ReceivedId& item : visit->fresh) ++visit->num_fresh[item.segment];
  }
}

// With limits: sorts and counts the ids without a row. Ids that have not come often enough get their initial row.
void HashTable::Admit(Visit* visit) {
  std::vector<ReceivedId>& fresh = visit->fresh;
  const auto before = [](const ReceivedId& a, const ReceivedId& b) {
    return std::tie(a.segment, a.id, a.position) < std::tie(b.segment, b.id, b.position);
  };
  std::sort(fresh.begin(), fresh.end(), before);
  visit->num_fresh.assign(segments(), 0);
  std::vector<char> initial(format(new_pool()).stride());
  size_t kept = 0;
  for (size_t begin = 0, end; begin < fresh.size(); begin = end) {
    const ReceivedId item = fresh[begin];
    for (end = begin; end < fresh.size() && fresh[end].id == item.id && fresh[end].segment == item.segment;) ++end;
    if (spec_.admission_count <= 1 || visit->shard->candidates[item.segment].Admit(item.id)) {
      ++visit->num_fresh[item.segment];
      for (size_t i = begin; i < end; ++i) fresh[kept++] = fresh[i];
      continue;
    }
    ++visit->shard->statistics[item.segment].refused;
    const int32_t number = static_cast<int32_t>(visit->handles.size());
    visit->handles.push_back(kNoRow);
    WriteInitial(item.segment, item.id, new_pool(), initial.data());
    for (size_t i = begin; i < end; ++i) {
      visit->scratch->number[visit->scratch->place[fresh[i].position]] = number;
      if (visit->rows.data == nullptr) continue;
      char* out = static_cast<char*>(visit->rows.data) +
                  static_cast<int64_t>(fresh[i].position) * spec_.dim * BytesOf(visit->rows.storage);
      format(new_pool()).CopyRow(initial.data(), visit->rows.storage, out);
    }
  }
  fresh.resize(kept);
}

absl::Status HashTable::VisitNew(Visit* visit) {
  Shard* shard = visit->shard;
  std::lock_guard<std::mutex> lock(shard->mutex);
  for (int64_t segment = 0; segment < static_cast<int64_t>(visit->num_fresh.size()); ++segment) {
    if (visit->num_fresh[segment] == 0) continue;
    const absl::Status reserved = shard->keys[segment].Reserve(visit->num_fresh[segment], &shard->retired);
    if (!reserved.ok()) return reserved;
  }
  for (const ReceivedId& item : visit->fresh) {
    uint32_t handle = shard->keys[item.segment].Find(item.id, TableHash(item.id));
    if (handle == kAbsent) {
      const absl::Status made = MakeRow(shard, item.segment, item.id, new_pool(), &handle);
      if (!made.ok()) return made;
    }
    Touch(visit, item, visit->scratch->place[item.position], handle, rows_.Row(handle));
  }
  if (spec_.hot_after > 0 && !visit->moving.empty()) NoteMove(visit->pins->now);
  for (const ReceivedId& item : visit->moving) {
    uint32_t handle = shard->keys[item.segment].Find(item.id, TableHash(item.id));
    absl::Status there;
    if (handle == kAbsent) {  // another lookup has evicted it since: it begins anew
      there = shard->keys[item.segment].Reserve(1, &shard->retired);
      if (there.ok()) there = MakeRow(shard, item.segment, item.id, spec_.hot_after > 0 ? 1 : 0, &handle);
    } else if (RowStore::PoolOf(handle) == 1 && (memory_rows_ > 0 || !visit->pins->Hold(*rows_.Header(handle)))) {
      // Another lookup may have taken the handle of a 16-bit row since this one chose to move the row.
      there = MoveRow(shard, item.segment, item.id, 0, &handle);
    }
    if (!there.ok()) return there;
    const int64_t place = visit->scratch->place[item.position];
    if (Touch(visit, item, place, handle, rows_.Row(handle))) ++shard->statistics[item.segment].hits;
  }
  return absl::OkStatus();
}

absl::Status HashTable::MakeRoomFor(const std::vector<Visit>& visits) {
  if (spec_.max_rows == 0 && memory_rows_ == 0) return absl::OkStatus();
  std::vector<int64_t> fresh(segments(), 0);
  Waiting waiting;
  for (const Visit& visit : visits) {
    for (size_t segment = 0; segment < visit.num_fresh.size(); ++segment) fresh[segment] += visit.num_fresh[segment];
    for (const ReceivedId& item : visit.moving) waiting.emplace_back(item.segment, item.id);
  }
  std::sort(waiting.begin(), waiting.end());
  waiting.erase(std::unique(waiting.begin(), waiting.end()), waiting.end());
  return MakeRoom(fresh, waiting);
}

absl::Status HashTable::Lookup(const Message& message, const ParallelFor& parallel_for, const RowSink& rows,
                               absl::Span<int32_t> inverse, std::vector<int64_t>* handles, uint32_t* lookup_clock,
                               const Ahead* ahead) {
  const RunningLookups::Lookup running(&lookups_);
  const uint32_t clock = running.clock();
  if (lookup_clock != nullptr) *lookup_clock = clock;
  version_.fetch_add(1);
  if (spec_.ttl > 0 && clock % std::max<int64_t>(1, spec_.ttl / 16) == 0) EvictExpired();
  const Pins pins = CurrentPins();
  std::vector<int64_t> shard_begin;
  LookupScratch* scratch = running.scratch();
  SortByShard(message, parallel_for, scratch, &shard_begin);
  std::vector<Visit> visits(kShards);
  for (int s = 0; s < kShards; ++s) {
    visits[s].shard = &shards_[s];
    visits[s].scratch = scratch;
    visits[s].begin = shard_begin[s];
    visits[s].end = shard_begin[s + 1];
    visits[s].clock = clock;
    visits[s].pins = &pins;
    visits[s].rows = rows;
    visits[s].ahead = ahead;
  }
  const int64_t cost_of_id = 120 + spec_.dim;  // cycles, roughly
  const int64_t cost_of_shard = cost_of_id * (message.num_ids / kShards + 1);
  parallel_for(kShards, cost_of_shard, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      if (visits[s].begin < visits[s].end) VisitKnown(&visits[s]);
    }
  });
  const absl::Status room = MakeRoomFor(visits);
  if (!room.ok()) return room;

  std::vector<absl::Status> failed(kShards);
  parallel_for(kShards, cost_of_shard / 4, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      if (!visits[s].fresh.empty() || !visits[s].moving.empty()) failed[s] = VisitNew(&visits[s]);
    }
  });
  for (const absl::Status& status : failed) {
    if (!status.ok()) return status;
  }

  // Numbers inside a shard become numbers of the whole, and go where their ids came from.
  handles->clear();
  for (const Visit& visit : visits) {
    const int32_t base = static_cast<int32_t>(handles->size());
    for (int64_t place = visit.begin; place < visit.end; ++place) scratch->number[place] += base;
    handles->insert(handles->end(), visit.handles.begin(), visit.handles.end());
  }
  parallel_for(message.num_ids, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) inverse[i] = scratch->number[scratch->place[i]];
  });
  return absl::OkStatus();
}

}  // namespace fusedrec
