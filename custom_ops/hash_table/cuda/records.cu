// Rows to and from records (row_layout.h), byte for byte, so that a checkpoint moves between CPU and GPU.
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
  uint16_t* const record = reinterpret_cast<uint16_t*>(records + (places == nullptr ? n : places[n]) * layout.bytes());
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
    const int32_t* __restrict__ inverse, int64_t count, const char* __restrict__ records, unsigned* last) {
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

#ifndef __CUDACC_RTC__
#include "hash_table/cuda/table_memory.h"

int fusedrec_table_read_records(FusedrecDeviceTable* table, const int64_t* handles, int64_t count, char* records,
                                void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (count > kDeviceTableMaxIds) return kCudaInvalidValue;
  if (count == 0) return kCudaSuccess;
  HandleFacts facts;
  FUSEDREC_TRY(table->CheckHandles({handles, count, nullptr, 0, nullptr, 0, 0.0f}, nullptr, kNoAttempt, &facts, stream));
  FUSEDREC_FOR_EACH(ReadRecordsKernel, 32 * count, stream, table->View(), handles, nullptr, count, records);
  return LastError();
}

int FusedrecDeviceTable::ReadRecordsOf(const int64_t* rows, const int64_t* places, int64_t count, char* records,
                                       void* stream) const {
  std::lock_guard<std::mutex> lock(mutex_);
  FUSEDREC_FOR_EACH(ReadRecordsKernel, 32 * count, stream, View(), rows, places, count, records);
  return LastError();
}

int FusedrecDeviceTable::ReceiveGrouped(const int64_t* ids, const int64_t* splits, Imported* imported,
                                        void* stream) const {
  const int64_t count = splits[segments()];
  int64_t* entries;
  FUSEDREC_TRY(imported->Take({{&entries, segments() + count}, {&imported->handles, count},
                                {&imported->inverse, count}, {&imported->last, 1}}));
  std::vector<int64_t> counts;
  for (int64_t s = 0; s < segments(); ++s) counts.push_back(splits[s + 1] - splits[s]);
  FUSEDREC_TRY(CopyToDevice(entries, counts.data(), segments(), stream));
  FUSEDREC_TRY(CopyOnDevice(entries + segments(), ids, count, stream));
  const int32_t size = static_cast<int32_t>(segments() + count);
  return Receive({entries, &size, 1}, imported, stream);
}

int FusedrecDeviceTable::WriteRecords(const int64_t* splits, const int64_t* ids, const char* records, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t count = splits[segments()];
  if (count > kDeviceTableMaxIds) return kCudaInvalidValue;
  if (count == 0) return kCudaSuccess;
  Imported imported(&allocator_);
  FUSEDREC_TRY(ReceiveGrouped(ids, splits, &imported, stream));
  imported.records = records;
  int64_t written;
  AdmitScratch scratch(&allocator_);
  FUSEDREC_TRY(scratch.TakeFor(count, false));
  FUSEDREC_TRY(Admit(imported, clock_, version_, false, scratch, imported.inverse, imported.handles, &written, stream));
  unsigned* const last = imported.last;
  FUSEDREC_TRY(Fill(last, 0, sizeof(unsigned), stream));
  FUSEDREC_FOR_EACH(WriteRecordsKernel, 32 * count, stream, View(), imported.handles, imported.inverse, count, records,
                    last);
  FUSEDREC_TRY(LastError());
  unsigned latest = 0;
  FUSEDREC_TRY(CopyToHost(&latest, last, 1, stream));
  // A lookup's clock must be ahead of the clocks in all rows.
  clock_ = std::max(clock_, latest);
  stale_until_ = clock_;  // gradients of earlier lookups are of the values before
  return kCudaSuccess;
}
#endif
