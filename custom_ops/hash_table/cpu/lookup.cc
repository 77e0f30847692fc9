// The training lookup; hash_table.h explains its steps.
#include <numeric>
#include <tuple>

#include "common/hash.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cpu/parts/message_runs.h"

namespace fusedrec {
namespace {

constexpr int kAhead = 16;         // ids between the fetch of a line of keys, that of a row, and its copy
constexpr int kRing = 2 * kAhead;  // ids under way
static_assert((kRing & (kRing - 1)) == 0, "the ring is indexed by a mask");
constexpr int64_t kBlock = 16 * 1024;  // ids per block of the counting sort

// Fills scratch->items with the ids of a message by shard, so that threads can share the shards among themselves.
//   shard_begin  [kShards + 1]  out: the items of shard s are [shard_begin[s], shard_begin[s + 1])
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
        const uint32_t position = static_cast<uint32_t>(pieces[p].position + i);
        scratch->items[place] = {ids[i], position, static_cast<uint32_t>(pieces[p].segment)};
      }
    }
  });
}

}  // namespace

class HashTable::TrainingLookup {
 public:
  // inverse: [V] out, the row of each id.
  TrainingLookup(HashTable* table, const RunningLookups::Lookup& running, const RowsOut& out, const Ahead* ahead,
                 int32_t* inverse)
      : table_(table), running_(running), rows_(&table->rows_), spec_(table->spec()), clock_(running.clock()),
        scratch_(running.scratch()), pins_(rows_->pins().Current()), out_(out), ahead_(ahead), inverse_(inverse),
        new_rows_wait_(rows_->has_max_rows() || rows_->has_admission() || table->tier_.is_on()) {}

  absl::Status Run(const Message& message, const ParallelFor& parallel_for, int64_t* handles, int64_t* num_rows);

 private:
  struct Judged {
    SegmentId key;
    bool is_admitted;
  };
  struct Visit {
    Shard* shard;
    int64_t begin, end;              // places of this shard's items
    std::vector<int64_t> handles;    // by number inside this shard
    std::vector<ReceivedId> fresh;   // without a row, which waits
    std::vector<ReceivedId> moving;  // whose row must move to pool 0 first
    std::vector<int64_t> num_fresh;  // with limits: distinct ids of `fresh`, by segment
    std::vector<SegmentId> made;     // got a row
    std::vector<Judged> judged;      // by admission
  };

  absl::Status VisitKnown(Visit* visit);
  void Judge(Visit* visit);
  absl::Status MakeRoom(const std::vector<Visit>& visits);
  absl::Status MakeRow(Visit* visit, const ReceivedId& item, uint32_t* handle);
  absl::Status FindOrMakeRow(Visit* visit, const ReceivedId& item, uint32_t* handle);
  absl::Status VisitNew(Visit* visit);
  void CountJudged(Visit* visit);
  void Undo(Visit* visit);
  absl::Status VisitAll(const ParallelFor& parallel_for, int64_t cost_of_shard, std::vector<Visit>* visits);
  void Touch(Visit* visit, const ReceivedId& item, uint32_t handle, char* row, bool write = true);
  char* Out(const ReceivedId& item) const {
    return static_cast<char*>(out_.data) + static_cast<int64_t>(item.position) * spec_.dim * BytesOf(out_.storage);
  }
  // Asks the memory for where the answer of an id begins: the ids of a shard are scattered over the message.
  void FetchOut(const ReceivedId& item) const {
    __builtin_prefetch(&inverse_[item.position], 1);
    if (out_.data != nullptr) __builtin_prefetch(Out(item), 1);
  }
  void WriteRow(const ReceivedId& item, int pool, const char* row) const {
    rows_->format(pool).CopyRow(row, out_.storage, Out(item));
  }

  HashTable* const table_;
  const RunningLookups::Lookup& running_;
  ShardedRows* const rows_;
  const TableSpec& spec_;
  const uint32_t clock_;
  LookupScratch* const scratch_;
  const Pins pins_;
  const RowsOut out_;
  const Ahead* const ahead_;  // null: there was none
  int32_t* const inverse_;    // until the end, numbers inside the shard
  const bool new_rows_wait_;  // until all shards are done
};

// Writes the row of an id to the lookup's result if `write` asks for it.
// Inlined, because a call for each id costs a sixth of a lookup.
__attribute__((always_inline)) inline void HashTable::TrainingLookup::Touch(
    Visit* visit, const ReceivedId& item, uint32_t handle, char* row, bool write) {
  RowHeader* header = RowFormat::Header(row);
  if (header->last != clock_) {  // this lookup sees the row for the first time
    Shard* shard = visit->shard;
    scratch_->before[visit->begin + visit->handles.size()] = {header->last, header->count, item.segment};
    ++shard->statistics[item.segment].hits;
    const int64_t num_rows = shard->keys[item.segment].size();
    rows_->change_log().Touch(&shard->changes, item.segment, item.id, header->last, num_rows);
    const uint32_t count = rows_->limits(item.segment).CountAt(header->count, header->last, clock_);
    header->last = clock_;
    header->number = static_cast<uint32_t>(visit->handles.size());
    header->count = count + (count != 0xffffffff);
    visit->handles.push_back(handle);
  }
  inverse_[item.position] = static_cast<int32_t>(header->number);
  if (write && out_.data != nullptr) WriteRow(item, RowStore::PoolOf(handle), row);
}

absl::Status HashTable::TrainingLookup::VisitKnown(Visit* visit) {
  if (visit->begin == visit->end) return absl::OkStatus();
  std::lock_guard<std::mutex> lock(visit->shard->mutex);
  rows_->FreeRetired(visit->shard);
  std::vector<KeyIndex>& keys = visit->shard->keys;
  const ReceivedId* items = scratch_->items.data() + visit->begin;
  const int64_t n = visit->end - visit->begin;
  visit->handles.reserve(n);
  const bool tiered = table_->tier_.is_on();
  uint64_t hashes[kRing];
  uint32_t handles[kRing];
  // Rows leave and move only under this mutex, so the look-ahead is valid for the whole shard or not used.
  const Ahead* ahead = ahead_ != nullptr && ahead_->moves == rows_->moves() ? ahead_ : nullptr;
  const auto seen = [&](const ReceivedId& item) { return ahead == nullptr ? kNoRow : ahead->handles[item.position]; };
  const bool copies = out_.data != nullptr && ahead == nullptr;  // few rows that were read ahead have changed since
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
      FetchOut(items[j]);
      if (handle != kAbsent) copies ? rows_->store().Fetch(handle) : rows_->store().FetchHeader(handle);
    }
    const int64_t k = i - kRing;
    if (k < 0 || k >= n) continue;
    uint32_t handle = handles[k & (kRing - 1)];
    if (handle == kAbsent && new_rows_wait_) {
      visit->fresh.push_back(items[k]);
      continue;
    }
    if (handle == kAbsent) FUSEDREC_TRY(FindOrMakeRow(visit, items[k], &handle));
    char* row = rows_->Row(handle);
    if (RowStore::PoolOf(handle) == 1) {
      const RowHeader& header = *RowFormat::Header(row);
      const int64_t count = rows_->limits(items[k].segment).CountAt(header.count, header.last, clock_);
      const bool hot = spec_.hot_after > 0 && count + 1 >= spec_.hot_after && !pins_.Hold(header);
      if (hot || tiered) {
        visit->moving.push_back(items[k]);
        continue;
      }
    }
    const bool is_written = seen(items[k]) != kNoRow && RowFormat::Header(row)->updated <= ahead->version;
    Touch(visit, items[k], handle, row, !is_written);
  }
  if (!visit->fresh.empty()) Judge(visit);
  return absl::OkStatus();
}

// With limits: sorts and counts the ids without a row. Ids that have not come often enough get their initial row.
void HashTable::TrainingLookup::Judge(Visit* visit) {
  visit->num_fresh.assign(rows_->segments(), 0);
  std::vector<ReceivedId>& fresh = visit->fresh;
  const auto before = [](const ReceivedId& a, const ReceivedId& b) {
    return std::tie(a.segment, a.id, a.position) < std::tie(b.segment, b.id, b.position);
  };
  std::sort(fresh.begin(), fresh.end(), before);
  const int pool = rows_->new_pool();
  std::vector<char> initial(rows_->format(pool).stride());
  size_t kept = 0;
  for (size_t begin = 0, end; begin < fresh.size(); begin = end) {
    const ReceivedId item = fresh[begin];
    for (end = begin; end < fresh.size() && fresh[end].id == item.id && fresh[end].segment == item.segment;) ++end;
    const bool is_judged = rows_->limits(item.segment).admission_count > 1;
    const bool is_admitted = !is_judged || visit->shard->candidates[item.segment].Admits(item.id);
    if (is_judged) visit->judged.push_back({{item.segment, item.id}, is_admitted});
    if (is_admitted) {
      ++visit->num_fresh[item.segment];
      for (size_t i = begin; i < end; ++i) fresh[kept++] = fresh[i];
      continue;
    }
    const int32_t number = static_cast<int32_t>(visit->handles.size());
    visit->handles.push_back(kNoRow);
    rows_->WriteInitial(item.segment, item.id, pool, initial.data());
    for (size_t i = begin; i < end; ++i) {
      inverse_[fresh[i].position] = number;
      if (out_.data != nullptr) WriteRow(fresh[i], pool, initial.data());
    }
  }
  fresh.resize(kept);
}

absl::Status HashTable::TrainingLookup::MakeRoom(const std::vector<Visit>& visits) {
  if (!rows_->has_max_rows() && !table_->tier_.is_on()) return absl::OkStatus();
  std::vector<int64_t> fresh(rows_->segments(), 0);
  WaitingIds waiting;
  for (const Visit& visit : visits) {
    for (size_t segment = 0; segment < visit.num_fresh.size(); ++segment) fresh[segment] += visit.num_fresh[segment];
    for (const ReceivedId& item : visit.moving) waiting.emplace_back(item.segment, item.id);
  }
  std::sort(waiting.begin(), waiting.end());
  waiting.erase(std::unique(waiting.begin(), waiting.end()), waiting.end());

  std::lock_guard<std::mutex> lock(rows_->room_mutex());
  const int64_t into_memory = std::accumulate(fresh.begin(), fresh.end(), static_cast<int64_t>(waiting.size()));
  FUSEDREC_TRY(table_->tier_.RequireRoom(into_memory));
  // No row leaves before there is room in every segment.
  for (const bool evicts : {false, true}) {
    for (int64_t segment = 0; segment < rows_->segments(); ++segment) {
      FUSEDREC_TRY(table_->evictor_.MakeRoom(segment, fresh[segment], waiting, evicts));
    }
  }
  return table_->tier_.MakeRoom(into_memory);
}

absl::Status HashTable::TrainingLookup::MakeRow(Visit* visit, const ReceivedId& item, uint32_t* handle) {
  Shard* shard = visit->shard;
  FUSEDREC_TRY(rows_->MakeRow(shard, item.segment, item.id, rows_->new_pool(), handle));
  visit->made.push_back({item.segment, item.id});
  --shard->statistics[item.segment].hits;  // which its touch counts
  return absl::OkStatus();
}

// An earlier item of the message may have made the row.
absl::Status HashTable::TrainingLookup::FindOrMakeRow(Visit* visit, const ReceivedId& item, uint32_t* handle) {
  *handle = visit->shard->keys[item.segment].Find(item.id, TableHash(item.id));
  return *handle == kAbsent ? MakeRow(visit, item, handle) : absl::OkStatus();
}

absl::Status HashTable::TrainingLookup::VisitNew(Visit* visit) {
  if (visit->fresh.empty() && visit->moving.empty()) return absl::OkStatus();
  Shard* shard = visit->shard;
  std::lock_guard<std::mutex> lock(shard->mutex);
  for (const ReceivedId& item : visit->fresh) {
    uint32_t handle;
    FUSEDREC_TRY(FindOrMakeRow(visit, item, &handle));
    Touch(visit, item, handle, rows_->Row(handle));
  }
  if (spec_.hot_after > 0 && !visit->moving.empty()) rows_->pins().NoteMove(pins_);
  for (const ReceivedId& item : visit->moving) {
    uint32_t handle = shard->keys[item.segment].Find(item.id, TableHash(item.id));
    if (handle == kAbsent) {  // another lookup has evicted it since: it begins anew
      FUSEDREC_TRY(MakeRow(visit, item, &handle));
    } else if (RowStore::PoolOf(handle) == 1 && (table_->tier_.is_on() || !pins_.Hold(*rows_->Header(handle)))) {
      // Another lookup may have taken the handle of a 16-bit row since this one chose to move the row.
      FUSEDREC_TRY(rows_->MoveRow(shard, item.segment, item.id, 0, &handle));
    }
    Touch(visit, item, handle, rows_->Row(handle));
  }
  return absl::OkStatus();
}

void HashTable::TrainingLookup::CountJudged(Visit* visit) {
  if (visit->judged.empty()) return;
  Shard* shard = visit->shard;
  std::lock_guard<std::mutex> lock(shard->mutex);
  for (const Judged& id : visit->judged) {
    AdmissionFilter& candidates = shard->candidates[id.key.segment];
    if (id.is_admitted) {
      candidates.Forget(id.key.id);
    } else {
      candidates.Count(id.key.id);
      ++shard->statistics[id.key.segment].refused;
    }
  }
}

// Gives the rows of a shard the counts that they had before this lookup, which has failed. Rows that another lookup has
// touched since stay as they are.
void HashTable::TrainingLookup::Undo(Visit* visit) {
  Shard* shard = visit->shard;
  std::lock_guard<std::mutex> lock(shard->mutex);
  for (size_t n = 0; n < visit->handles.size(); ++n) {
    if (visit->handles[n] == kNoRow) continue;
    const RowBefore& before = scratch_->before[visit->begin + n];
    RowHeader* header = rows_->Header(static_cast<uint32_t>(visit->handles[n]));
    --shard->statistics[before.segment].hits;
    if (header->last != clock_) continue;
    header->last = before.last;
    header->count = before.count;
  }
  for (const SegmentId& key : visit->made) {
    ++shard->statistics[key.segment].hits;
    KeyIndex& keys = shard->keys[key.segment];
    const uint32_t handle = keys.Find(key.id, TableHash(key.id));
    if (handle == kAbsent || rows_->Header(handle)->last != 0) continue;
    keys.Remove(key.id, TableHash(key.id));
    rows_->GiveBack(shard, handle);
    --shard->statistics[key.segment].inserts;
  }
}

// Both visits of all shards, with the rows that leave in between.
absl::Status HashTable::TrainingLookup::VisitAll(const ParallelFor& parallel_for, int64_t cost_of_shard,
                                                 std::vector<Visit>* visits) {
  const auto visit_shards = [&](int64_t cost, absl::Status (TrainingLookup::*visit)(Visit*)) {
    std::vector<absl::Status> done(kShards);
    parallel_for(kShards, cost, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) done[s] = (this->*visit)(&(*visits)[s]);
    });
    for (const absl::Status& status : done) FUSEDREC_TRY(status);
    return absl::OkStatus();
  };
  // New rows are of a version that begins here or, where a lack of room may refuse them, after MakeRoom.
  if (!new_rows_wait_) rows_->NextVersion();
  FUSEDREC_TRY(visit_shards(cost_of_shard, &TrainingLookup::VisitKnown));
  FUSEDREC_TRY(MakeRoom(*visits));
  if (new_rows_wait_) rows_->NextVersion();
  FUSEDREC_TRY(visit_shards(cost_of_shard / 4, &TrainingLookup::VisitNew));
  return table_->demoter_.DemoteCold(clock_);
}

absl::Status HashTable::TrainingLookup::Run(const Message& message, const ParallelFor& parallel_for, int64_t* handles,
                                            int64_t* num_rows) {
  std::vector<int64_t> shard_begin;
  SortByShard(message, rows_->segments(), parallel_for, scratch_, &shard_begin);
  std::vector<Visit> visits(kShards);
  for (int s = 0; s < kShards; ++s) {
    visits[s].shard = &rows_->shards()[s];
    visits[s].begin = shard_begin[s];
    visits[s].end = shard_begin[s + 1];
  }
  const int64_t cost_of_shard = (120 + spec_.dim) * (message.num_ids / kShards + 1);  // cycles, roughly
  const absl::Status done = VisitAll(parallel_for, cost_of_shard, &visits);
  for (Visit& visit : visits) done.ok() ? CountJudged(&visit) : Undo(&visit);
  FUSEDREC_TRY(done);
  rows_->HalveCandidates();

  int64_t* next = handles;
  uint64_t sum = 0;
  for (const Visit& visit : visits) {
    const int32_t base = static_cast<int32_t>(next - handles);
    for (int64_t place = visit.begin; place < visit.end; ++place) inverse_[scratch_->items[place].position] += base;
    for (const int64_t handle : visit.handles) {
      sum += handle == kNoRow ? 0 : Mix64(static_cast<uint32_t>(handle));
      // The clock above the row number tells an update whether the rows are still where they were.
      *next++ = handle == kNoRow ? kNoRow : int64_t{clock_} << 32 | handle;
    }
  }
  *num_rows = next - handles;
  running_.NoteHandles(sum);
  return absl::OkStatus();
}

absl::Status HashTable::Lookup(const TableCall& call, const Message& message, int64_t window, const Ahead* ahead,
                               const RowsOut& rows, int32_t* inverse, int64_t* handles, int64_t* num_rows) {
  FUSEDREC_TRY(RequireTrainable(spec()));
  if (ahead != nullptr) FUSEDREC_TRY(CheckAhead(call, message, *ahead));
  return LookUp(call, message, window, ahead, rows, inverse, handles, num_rows);
}

bool HashTable::FloatsOf(absl::Span<const int64_t> handles, std::vector<const float*>* rows) const {
  if (spec().storage != Storage::kFloat32 || rows_.store().HasPool(1) || rows_.has_admission()) return false;
  for (const int64_t handle : handles) rows->push_back(format(0).Row(rows_.Row(static_cast<uint32_t>(handle))));
  return true;
}

absl::Status HashTable::LookUp(const TableCall& call, const Message& message, int64_t window, const Ahead* ahead,
                               const RowsOut& rows, int32_t* inverse, int64_t* handles, int64_t* num_rows) {
  RunningLookups::Lookup running(&rows_.pins().lookups(), window);
  absl::Status done = running.clock() > kMostClock ? ClockEnds() : absl::OkStatus();
  if (done.ok()) {
    evictor_.EvictExpired(running.clock());
    done = TrainingLookup(this, running, rows, ahead, inverse).Run(message, call.parallel_for, handles, num_rows);
  }
  if (!done.ok()) running.GiveClockBack();
  return done;
}

}  // namespace fusedrec
