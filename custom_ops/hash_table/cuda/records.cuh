// Kernels of rows to and from records (rows.cuh), byte for byte, so that a checkpoint moves between CPU and GPU.
#pragma once

#include "hash_table/cuda/rows.cuh"

namespace fusedrec::device_table {

// Words of 16 bits of row and slots, between a row and the rest of a record; this lane's.
template <typename Copy>
__device__ inline void ForWords(const RecordLayout& record, const RowLayout& layout, const Copy& copy) {
  const int packed = record.packed_bytes / 2, scalars = record.scalars_bytes / 2;
  for (int i = Lane(); i < packed + scalars; i += 32) copy(i, i < packed ? i : layout.scalars_offset / 2 + i - packed);
}

// handles may be null: the first `count` rows. places may be null; else record n goes to the places[n]-th place.
FUSEDREC_KERNEL ReadRecordsKernel(TableView table, const int64_t* __restrict__ handles,
                                  const int64_t* __restrict__ places, int64_t count, char* __restrict__ records) {
  const int64_t n = GlobalThread() / 32;
  if (n >= count) return;
  const RecordLayout layout(table.layout);
  const uint32_t number = static_cast<uint32_t>(handles == nullptr ? n : handles[n]);
  const StoredRow at = table.At(number);
  const uint16_t* const row = reinterpret_cast<const uint16_t*>(at.data);
  uint16_t* const record =
      reinterpret_cast<uint16_t*>(records + (places == nullptr ? n : places[n]) * layout.bytes());
  const bool is_cold = at.layout.storage != table.layout.storage;
  if (Lane() < 4) {
    const RowMeta& meta = *table.Meta(number);
    PutWord(Lane() == 0 ? meta.last : Lane() == 1 ? meta.count : Lane() == 2 ? meta.updated : is_cold, Lane(), record);
  }
  if (is_cold) {
    for (int j = Lane(); j < at.layout.numbers(); j += 32) PutWord(BitsOf(at.Load(j)), kRecordHeader / 4 + j, record);
    return;
  }
  ForWords(layout, table.layout, [&](int to, int from) { record[kRecordHeader / 2 + to] = row[from]; });
}

// The rows of handles[inverse[n]]; *last becomes at least that of every record.
FUSEDREC_KERNEL WriteRecordsKernel(TableView table, const int64_t* __restrict__ handles,
                                   const int32_t* __restrict__ inverse, int64_t count, const char* __restrict__ records,
                                   unsigned* last) {
  const int64_t n = GlobalThread() / 32;
  if (n >= count) return;
  const RecordLayout layout(table.layout);
  const uint32_t number = static_cast<uint32_t>(handles[inverse[n]]);
  const StoredRow at = table.At(number);
  uint16_t* const row = reinterpret_cast<uint16_t*>(at.data);
  const uint16_t* const record = reinterpret_cast<const uint16_t*>(records + n * layout.bytes());
  if (Lane() < 3) {
    const uint32_t word = WordOf(record, Lane());
    RowMeta* const meta = table.Meta(number);
    *(Lane() == 0 ? &meta->last : Lane() == 1 ? &meta->count : &meta->updated) = word;
    if (Lane() == 0) atomicMax(last, word);
  }
  if (at.layout.storage != table.layout.storage) {
    const uint32_t updated = WordOf(record, kRecordUpdated);
    for (int j = Lane(); j < at.layout.numbers(); j += 32) {
      at.Store(FloatOf(WordOf(record, kRecordHeader / 4 + j)), j, updated);
    }
    return;
  }
  ForWords(layout, table.layout, [&](int from, int to) { row[to] = record[kRecordHeader / 2 + from]; });
}

}  // namespace fusedrec::device_table
