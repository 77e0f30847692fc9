#include "hash_table/cpu/hash_table.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/hash.h"

namespace fusedrec {

absl::StatusOr<std::unique_ptr<HashTable>> HashTable::Make(TableSpec spec, Optimizer optimizer) {
  const bool mixed = spec.hot_after > 0, tiered = spec.memory_budget > 0;
  if (spec.dim <= 0 || spec.seeds.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("dim and the number of segments must be > 0, got ", spec.dim, " and ",
                                                   spec.seeds.size(), "."));
  }
  if (mixed && (tiered || spec.storage != Storage::kFloat32)) {
    return absl::InvalidArgumentError(
        "hot_after moves rows between a 16-bit and a float32 pool: it needs storage 'float32' and no memory budget.");
  }
  if (tiered && spec.tier_folder.empty()) {
    return absl::InvalidArgumentError("memory_budget needs a tier_folder for the rows beyond it, got none.");
  }
  std::unique_ptr<HashTable> table(new HashTable(std::move(spec), std::move(optimizer)));
  const absl::Status opened = table->rows_.Open(table->spec_, table->optimizer_);
  if (!opened.ok()) return opened;
  if (tiered) {
    table->memory_rows_ = std::max<int64_t>(table->spec_.memory_budget / table->format(0).stride(), 1);
  }
  return table;
}

HashTable::HashTable(TableSpec spec, Optimizer optimizer)
    : spec_(std::move(spec)),
      optimizer_(std::move(optimizer)),
      shards_(new Shard[kShards]),
      accumulator_(spec_.dim),
      trained_(segments()) {
  const int64_t limit = (spec_.max_candidates + kShards - 1) / kShards;
  for (int s = 0; s < kShards; ++s) {
    Shard& shard = shards_[s];
    const double stagger = static_cast<double>(s) / kShards;
    for (int64_t segment = 0; segment < segments(); ++segment) {
      shard.keys.emplace_back(stagger);
      if (spec_.admission_count > 1) shard.candidates.emplace_back(spec_.admission_count, limit, stagger);
    }
    shard.statistics.resize(segments());
    shard.changes = ChangeLog::Lists(segments());
    shard.unsynced.resize(segments());
  }
}

void HashTable::FreeRetired(Shard* shard) const {
  if (shard->retired.empty() && shard->spare.given_back.empty()) return;
  if (readers_.fetch_add(0, std::memory_order_seq_cst) != 0) return;
  shard->retired.clear();
  RowStore::Reuse(&shard->spare);
}

bool HashTable::IsHandle(int64_t handle) const {
  if (handle == kNoRow) return true;
  return handle >= 0 && handle <= 0xffffffff && rows_.IsHandle(static_cast<uint32_t>(handle));
}

absl::Status HashTable::TakeRow(Shard* shard, int pool, uint32_t* handle) {
  if (shard->spare.free[pool].empty()) FreeRetired(shard);
  return rows_.Take(&shard->spare, pool, handle);
}

void HashTable::GiveBack(Shard* shard, uint32_t handle) {
  moves_.fetch_add(1);
  rows_.GiveBack(&shard->spare, handle);
}

void HashTable::InitialNumbers(int64_t segment, int64_t id, float* numbers) const {
  const int dim = spec_.dim, wide = optimizer_.wide_slots();
  InitialRow(spec_.distribution, spec_.a, spec_.b, spec_.seeds[segment], id, absl::MakeSpan(numbers, dim));
  for (int k = 0; k < wide; ++k) std::fill_n(numbers + (1 + k) * dim, dim, optimizer_.wide_start(k));
  for (int k = 0; k < optimizer_.scalar_slots(); ++k) numbers[(1 + wide) * dim + k] = optimizer_.scalar_start(k);
}

// Header, embedding and slots of a row that was never trained. Rounded alike whenever it comes, and comes back.
void HashTable::WriteInitial(int64_t segment, int64_t id, int pool, char* row) const {
  *RowFormat::Header(row) = {0, 0, 0, version_.load(std::memory_order_relaxed)};
  const RowFormat& row_format = format(pool);
  if (row_format.storage() == Storage::kFloat32) {
    InitialNumbers(segment, id, row_format.Row(row));  // row and slots lie one after the other
    return;
  }
  std::vector<float> numbers(row_format.numbers());
  InitialNumbers(segment, id, numbers.data());
  row_format.Store(numbers.data(), 0, row);
}

absl::Status HashTable::MakeRow(Shard* shard, int64_t segment, int64_t id, int pool, uint32_t* handle) {
  const absl::Status taken = TakeRow(shard, pool, handle);
  if (!taken.ok()) return taken;
  WriteInitial(segment, id, pool, rows_.Row(*handle));
  shard->keys[segment].Insert(id, TableHash(id), *handle);
  ++shard->statistics[segment].inserts;
  return absl::OkStatus();
}

absl::Status HashTable::MoveRow(Shard* shard, int64_t segment, int64_t id, int to_pool, uint32_t* handle) {
  const uint32_t old = *handle;
  const absl::Status taken = TakeRow(shard, to_pool, handle);
  if (!taken.ok()) return taken;
  char *from = rows_.Row(old), *to = rows_.Row(*handle);
  if (memory_rows_ > 0) {  // the same format: every bit stays
    std::memcpy(to, from, format(0).stride());
  } else {
    std::vector<float> numbers(format(0).numbers());
    format(RowStore::PoolOf(old)).Load(from, numbers.data());
    *RowFormat::Header(to) = *RowFormat::Header(from);
    format(to_pool).Store(numbers.data(), RowFormat::Header(from)->updated, to);
  }
  shard->keys[segment].Replace(id, TableHash(id), *handle);
  GiveBack(shard, old);
  return absl::OkStatus();
}

void HashTable::RemoveKey(Shard* shard, int64_t segment, int64_t id) {
  const uint32_t handle = shard->keys[segment].Remove(id, TableHash(id));
  if (handle == kAbsent) return;
  GiveBack(shard, handle);
  if (spec_.record_tombstones) shard->changes.left[segment].push_back(id);
  if (spec_.averaged) shard->unsynced[segment].push_back(id);
}

}  // namespace fusedrec
