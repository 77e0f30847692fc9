#include "hash_table/cpu/rows/sharded_rows.h"

#include "common/hash.h"
#include "initial_rows/initial_rows.h"

namespace fusedrec {

template <typename Condition>
static bool AnyOf(const TableSpec& spec, const Condition& condition) {
  return std::any_of(spec.limits.begin(), spec.limits.end(), condition);
}

ShardedRows::ShardedRows(TableSpec spec)
    : spec_(std::move(spec)), has_max_rows_(AnyOf(spec_, [](const Limits& limits) { return limits.max_rows > 0; })),
      has_admission_(AnyOf(spec_, [](const Limits& limits) { return limits.admission_count > 1; })),
      shards_(new Shard[kShards]) {
  for (int s = 0; s < kShards; ++s) {
    Shard& shard = shards_[s];
    const double stagger = static_cast<double>(s) / kShards;
    for (int64_t segment = 0; segment < segments(); ++segment) {
      shard.keys.emplace_back(stagger);
      if (has_admission_) shard.candidates.emplace_back(limits(segment).admission_count, stagger);
    }
    shard.statistics.resize(segments());
    shard.changes = ChangeLog::Lists(segments());
    shard.unsynced.resize(segments());
  }
}

int64_t ShardedRows::size(int64_t segment) const {
  int64_t size = 0;
  for (const Shard& shard : shards()) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    size += shard.keys[segment].size();
  }
  return size;
}

void ShardedRows::FreeRetired(Shard* shard) const {
  if (shard->retired.empty() && shard->spare.given_back.empty()) return;
  if (readers_.fetch_add(0, std::memory_order_seq_cst) != 0) return;
  shard->retired.clear();
  RowStore::Reuse(&shard->spare);
}

absl::Status ShardedRows::TakeRow(Shard* shard, int pool, uint32_t* handle) {
  if (shard->spare.free[pool].empty()) FreeRetired(shard);
  return store_.Take(&shard->spare, pool, handle);
}

void ShardedRows::GiveBack(Shard* shard, uint32_t handle) {
  EndLookAheads();
  store_.GiveBack(&shard->spare, handle);
}

void ShardedRows::InitialNumbers(int64_t segment, int64_t id, float* numbers) const {
  const auto [wide, scalars] = SlotsOf(spec_.rule);
  const int dim = spec_.dim;
  InitialRow(spec_.distribution, spec_.a, spec_.b, spec_.seeds[segment], id, absl::MakeSpan(numbers, dim));
  for (int k = 0; k < wide; ++k) std::fill_n(numbers + (1 + k) * dim, dim, SlotStart(spec_.rule, k));
  for (int k = 0; k < scalars; ++k) numbers[(1 + wide) * dim + k] = SlotStart(spec_.rule, wide + k);
}

void ShardedRows::WriteInitial(int64_t segment, int64_t id, int pool, char* row) const {
  *RowFormat::Header(row) = {0, 0, 0, version()};
  const RowFormat& row_format = format(pool);
  if (row_format.storage() == Storage::kFloat32) {
    InitialNumbers(segment, id, row_format.Row(row));  // row and slots lie one after the other
    return;
  }
  std::vector<float> numbers(row_format.numbers());
  InitialNumbers(segment, id, numbers.data());
  row_format.Store(numbers.data(), 0, row);
}

void ShardedRows::CopyInitial(int64_t segment, int64_t id, Storage to, std::vector<char>* scratch, void* out) const {
  const RowFormat& row_format = format(new_pool());
  if (row_format.storage() == Storage::kInt8) {
    std::vector<float> numbers(row_format.numbers());
    scratch->resize(4 * spec_.dim);
    InitialNumbers(segment, id, numbers.data());
    Convert(numbers.data(), Storage::kFloat32, spec_.dim, spec_.initial_storage, scratch->data());
    return Convert(scratch->data(), spec_.initial_storage, spec_.dim, to, out);
  }
  scratch->resize(row_format.stride());
  WriteInitial(segment, id, new_pool(), scratch->data());
  row_format.CopyRow(scratch->data(), to, out);
}

absl::Status ShardedRows::MakeRow(Shard* shard, int64_t segment, int64_t id, int pool, uint32_t* handle) {
  FUSEDREC_TRY(shard->keys[segment].Reserve(1, &shard->retired));
  FUSEDREC_TRY(TakeRow(shard, pool, handle));
  WriteInitial(segment, id, pool, Row(*handle));
  shard->keys[segment].Insert(id, TableHash(id), *handle);
  ++shard->statistics[segment].inserts;
  return absl::OkStatus();
}

absl::Status ShardedRows::MoveRow(Shard* shard, int64_t segment, int64_t id, int to_pool, uint32_t* handle) {
  const uint32_t old = *handle;
  FUSEDREC_TRY(TakeRow(shard, to_pool, handle));
  char *from = Row(old), *to = Row(*handle);
  const RowFormat &from_format = format(RowStore::PoolOf(old)), &to_format = format(to_pool);
  if (from_format.storage() == to_format.storage()) {  // every bit stays
    std::memcpy(to, from, from_format.stride());
  } else {
    std::vector<float> numbers(from_format.numbers());
    from_format.Load(from, numbers.data());
    *RowFormat::Header(to) = *RowFormat::Header(from);
    to_format.Store(numbers.data(), RowFormat::Header(from)->updated, to);
  }
  shard->keys[segment].Replace(id, TableHash(id), *handle);
  GiveBack(shard, old);
  return absl::OkStatus();
}

void ShardedRows::RemoveKey(Shard* shard, int64_t segment, int64_t id) {
  const uint32_t handle = shard->keys[segment].Remove(id, TableHash(id));
  if (handle == kAbsent) return;
  GiveBack(shard, handle);
  if (spec_.record_tombstones) shard->changes.left[segment].push_back(id);
  if (spec_.averaged) shard->unsynced[segment].push_back(id);
}

void ShardedRows::HalveCandidates() {
  if (!has_admission_) return;
  std::lock_guard<std::mutex> lock(room_mutex_);
  for (int64_t segment = 0; segment < segments(); ++segment) {
    if (limits(segment).max_candidates == 0) continue;
    for (bool halve = false;; halve = true) {
      int64_t counted = 0;
      for (Shard& shard : shards()) {
        std::lock_guard<std::mutex> shard_lock(shard.mutex);
        if (halve) shard.candidates[segment].Halve();
        counted += shard.candidates[segment].size();
      }
      if (counted <= limits(segment).max_candidates) break;
    }
  }
}

void ShardedRows::SetClock(uint32_t clock, uint32_t version) {
  pins_.SetClock(clock);
  version_.store(version);
  EndLookAheads();     // their versions are of another count
  change_log_.Stop();  // it counts by the clock of before
}

}  // namespace fusedrec
