// Rows to and from checkpoints; row_layout.h has the layout.
#include "hash_table/cuda/records.cuh"

#include <algorithm>
#include <numeric>

#include "hash_table/cuda/table_memory.h"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

int64_t FusedrecDeviceTable::record_bytes() const { return RecordLayout(layout_).bytes(); }

int fusedrec_table_read_records(FusedrecDeviceTable* table, const int64_t* handles, int64_t count, char* records,
                                void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (count < 0 || count > kDeviceTableMaxIds) return kCudaInvalidValue;
  if (count == 0) return kCudaSuccess;
  HandleFacts facts;
  FUSEDREC_RETURN_IF_CUDA_ERROR(table->CheckHandles(handles, count, nullptr, 0, {}, nullptr, kNoAttempt, &facts, stream));
  FUSEDREC_LAUNCH(ReadRecordsKernel, BlocksFor(32 * count, kRecordThreads), kRecordThreads, 0, stream, table->View(), handles,
                  nullptr, count, records);
  return LastError();
}

int FusedrecDeviceTable::ReadRecordsOf(const int64_t* rows, const int64_t* places, int64_t count, char* records,
                                       void* stream) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (count == 0) return kCudaSuccess;
  FUSEDREC_LAUNCH(ReadRecordsKernel, BlocksFor(32 * count, kRecordThreads), kRecordThreads, 0, stream, View(), rows, places,
                  count, records);
  return LastError();
}

int FusedrecDeviceTable::ReceiveGrouped(const int64_t* ids, const int64_t* splits, Imported* imported,
                                        void* stream) const {
  const int64_t count = splits[segments()];
  int64_t* entries;
  FUSEDREC_RETURN_IF_CUDA_ERROR(imported->Take(
      {{&entries, segments() + count}, {&imported->handles, count}, {&imported->inverse, count}, {&imported->last, 1}}));
  std::vector<int64_t> counts;
  for (int64_t s = 0; s < segments(); ++s) counts.push_back(splits[s + 1] - splits[s]);
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(entries, counts.data(), segments(), stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(static_cast<int>(cudaMemcpyAsync(
      entries + segments(), ids, count * sizeof(int64_t), cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream))));
  const int32_t size = static_cast<int32_t>(segments() + count);
  return Receive({entries, &size, 1}, imported, stream);
}

int FusedrecDeviceTable::WriteRecords(const std::vector<int64_t>& counts, const int64_t* ids, const char* records,
                                      void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t segments = segments_.size(), count = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (static_cast<int64_t>(counts.size()) != segments || count > kDeviceTableMaxIds) return kCudaInvalidValue;
  if (count == 0) return kCudaSuccess;
  std::vector<int64_t> splits(segments + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), splits.begin() + 1);
  Imported imported(&allocator_);
  FUSEDREC_RETURN_IF_CUDA_ERROR(ReceiveGrouped(ids, splits.data(), &imported, stream));
  imported.records = records;
  int64_t written;
  AdmitScratch scratch(&allocator_);
  FUSEDREC_RETURN_IF_CUDA_ERROR(scratch.TakeFor(count, false));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Admit(imported, clock_, version_, false, scratch, imported.inverse,
                                      imported.handles, &written, stream));
  unsigned* const last = imported.last;
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(last, 0, sizeof(unsigned), stream));
  FUSEDREC_LAUNCH(WriteRecordsKernel, BlocksFor(32 * count, kRecordThreads), kRecordThreads, 0, stream, View(),
                  imported.handles, imported.inverse, count, records, last);
  FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  unsigned latest = 0;
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(&latest, last, 1, stream));
  // A lookup's clock must be ahead of the clocks in all rows.
  clock_ = std::max(clock_, latest);
  moved_at_ = int64_t{clock_} + options_.window;  // gradients of earlier lookups are of the values before
  return kCudaSuccess;
}

void FusedrecDeviceTable::SetClock(int64_t clock, int64_t version) {
  std::lock_guard<std::mutex> lock(mutex_);
  clock_ = static_cast<uint32_t>(clock);
  version_ = static_cast<uint32_t>(version);
  moved_at_ = clock + options_.window;  // handles of before are of another clock
}
