#include "hash_table/cpu/rows/row_store.h"

#include <utility>

namespace fusedrec {

absl::Status RowStore::Open(const TableSpec& spec) {
  const bool mixed = spec.hot_after > 0, tiered = spec.memory_budget > 0;
  const auto [wide, scalars] = SlotsOf(spec.rule);
  const RowFormat first(spec.storage, spec.dim, wide, scalars, spec.stochastic_rounding);
  const RowFormat cold(Storage::kFloat16, spec.dim, wide, scalars, spec.stochastic_rounding);
  auto memory = RowPool::Make(first, "");
  if (!memory.ok()) return memory.status();
  pools_[0] = *std::move(memory);
  fetch_bytes_[0] = sizeof(RowHeader) + spec.dim * BytesOf(spec.storage);
  fetch_bytes_[1] = sizeof(RowHeader) + spec.dim * BytesOf(mixed ? Storage::kFloat16 : spec.storage);
  if (!mixed && !tiered) return absl::OkStatus();
  auto second = RowPool::Make(mixed ? cold : first, tiered ? spec.tier_folder : "");
  if (!second.ok()) return second.status();
  pools_[1] = *std::move(second);
  return absl::OkStatus();
}

absl::Status RowStore::Take(Spare* spare, int pool, uint32_t* handle) {
  std::vector<uint32_t>& free = spare->free[pool];
  if (free.empty()) {
    uint32_t first;
    const absl::Status taken = pools_[pool]->TakeBlock(&first);
    if (!taken.ok()) return taken;
    for (uint32_t n = RowPool::kBlockRows; n-- > 0;) free.push_back(first + n);
  }
  *handle = free.back() | (pool == 0 ? 0 : kPoolBit);
  free.pop_back();
  size_[pool].fetch_add(1, std::memory_order_relaxed);
  return absl::OkStatus();
}

void RowStore::GiveBack(Spare* spare, uint32_t handle) {
  spare->given_back.push_back(handle);
  size_[PoolOf(handle)].fetch_sub(1, std::memory_order_relaxed);
}

void RowStore::Reuse(Spare* spare) {
  for (const uint32_t handle : spare->given_back) spare->free[PoolOf(handle)].push_back(handle & ~kPoolBit);
  spare->given_back.clear();
}

}  // namespace fusedrec
