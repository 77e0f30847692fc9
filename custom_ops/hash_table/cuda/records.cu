// Rows to and from checkpoints; row_layout.h has the layout.
#include "hash_table/cuda/records.cuh"

#include <algorithm>

#include "hash_table/cuda/table_memory.h"

int fusedrec_table_read_records(FusedrecDeviceTable* table, const int64_t* handles, int64_t count, char* records,
                                void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (count < 0 || count > kDeviceTableMaxIds) return kCudaInvalidValue;
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
