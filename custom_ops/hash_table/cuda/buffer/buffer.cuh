// Kernels of the two buffers and the pool: rows that two tables hold, found by key and copied from one to the other; and
// copies of records.
#pragma once

#include "hash_table/cuda/rows.cuh"

namespace fusedrec::device_table {

// newer_row[n]: row of `newer` with the key of row n of `table`, kNowhere without. *shared counts them, once per block.
FUSEDREC_KERNEL IntersectKernel(TableView table, int64_t num_rows, TableView newer, uint32_t* __restrict__ newer_row,
                                unsigned long long* shared) {
  FUSEDREC_SHARED(unsigned, of_block, 1);
  if (threadIdx.x == 0) of_block[0] = 0;
  __syncthreads();
  const int64_t n = GlobalThread();
  const bool active = n < num_rows;
  const RowMeta* const meta = active ? table.Meta(static_cast<uint32_t>(n)) : nullptr;
  const int64_t id = active ? meta->id : 0;
  const uint32_t row = FindRow(active ? newer.segments + meta->segment : nullptr, id, TableHash(id));
  if (active) newer_row[n] = row;
  const unsigned found = __ballot_sync(GroupMask(), row != kNowhere);
  if (GroupLane() == 0 && found != 0) atomicAdd(&of_block[0], static_cast<unsigned>(__popc(found)));
  __syncthreads();
  if (threadIdx.x == 0 && of_block[0] != 0) atomicAdd(shared, static_cast<unsigned long long>(of_block[0]));
}

// A warp per row copies embedding, slots and meta.
FUSEDREC_KERNEL RefreshKernel(TableView table, int64_t num_rows, TableView newer,
                              const uint32_t* __restrict__ newer_row) {
  const int64_t n = GlobalThread() / 32;
  if (n >= num_rows || newer_row[n] == kNowhere) return;
  const uint32_t row = newer_row[n], own = static_cast<uint32_t>(n);
  const uint4* const from = reinterpret_cast<const uint4*>(newer.Row(row));
  uint4* const to = reinterpret_cast<uint4*>(table.Row(own));
  for (int i = Lane(); i < table.layout.stride / 16; i += 32) to[i] = from[i];
  if (Lane() != 0) return;
  const RowMeta& known = *newer.Meta(row);
  RowMeta* const meta = table.Meta(own);
  meta->last = known.last;
  meta->count = known.count;
  meta->updated = known.updated;
}

// A warp per record, which begins at any even address (rows.cuh): records[n] = pool[slots[n]].
FUSEDREC_KERNEL CopyRecordsKernel(const char* __restrict__ pool, const int64_t* __restrict__ slots, int64_t count,
                                  int64_t record_bytes, char* __restrict__ records) {
  const int64_t n = GlobalThread() / 32;
  if (n >= count) return;
  const uint16_t* const from = reinterpret_cast<const uint16_t*>(pool + slots[n] * record_bytes);
  uint16_t* const to = reinterpret_cast<uint16_t*>(records + n * record_bytes);
  for (int64_t i = Lane(); i < record_bytes / 2; i += 32) to[i] = from[i];
}

}  // namespace fusedrec::device_table
