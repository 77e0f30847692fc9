// Rows that leave, and lists of rows; select.cuh says how they are found.
#include <algorithm>

#include "hash_table/cpu/rows/distinct_ids.h"
#include "hash_table/cuda/lowest.cuh"
#include "hash_table/cuda/select_pass.cuh"
#include "hash_table/cuda/table_memory.h"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

namespace {

constexpr unsigned kMostBlocks = 132 * 16;

}  // namespace

int SelectScratch::TakeFor(int64_t num_rows, int64_t segments) {
  // A tile takes the pass to its end where there are no rows.
  tiles = std::max<int64_t>((num_rows + kSelectThreads - 1) / kSelectThreads, 1);
  return Take({{&states, tiles}, {&next_tile, 1}, {&selected, 1 + segments + 2}});
}

int FusedrecDeviceTable::AllocateRemovedRows(int64_t most, int64_t num_rows, RemovedRows* removed) const {
  FUSEDREC_RETURN_IF_CUDA_ERROR(removed->Take({{&removed->search, 1}, {&removed->bins, 256}}));
  FUSEDREC_RETURN_IF_CUDA_ERROR(removed->TakeFor(num_rows, segments()));
  if (!options_.record_tombstones && !options_.averaged) return kCudaSuccess;
  return removed->Take({{&removed->left, most}});
}

int FusedrecDeviceTable::CountThatMayLeave(int64_t segment, const Pins& pins, const SelectScratch& select,
                                           int64_t* count, void* stream) const {
  *count = 0;
  if (limits_[segment].eviction == Eviction::kNone) return kCudaSuccess;
  const MayLeave may_leave{static_cast<uint32_t>(segment), limits_[segment], pins, nullptr};
  return Count(may_leave, select, count, stream);
}

int FusedrecDeviceTable::EvictWorst(int64_t segment, int64_t count, const Pins& pins, const RemovedRows& removed,
                                    void* stream) {
  if (count <= 0) return kCudaSuccess;
  Search* const search = removed.search;
  unsigned* const bins = removed.bins;
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(search, 0, BytesBetween(search, bins + 256), stream));
  const unsigned long long wanted = static_cast<unsigned long long>(count);
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(&search->count, &wanted, 1, stream));
  MayLeave may_leave{static_cast<uint32_t>(segment), limits_[segment], pins, nullptr};
  const unsigned blocks = std::min(BlocksFor(rows_.next, kSelectThreads), kMostBlocks);
  for (int byte = limits_[segment].eviction == Eviction::kLru ? 4 : 0; byte < kScoreBytes; ++byte) {  // clocks have 32 bits
    FUSEDREC_LAUNCH(CountBytesKernel, blocks, kSelectThreads, 0, stream, View(), rows_.next, may_leave, search, byte,
                    bins);
    FUSEDREC_LAUNCH(ChooseByteKernel, 1u, 256, 0, stream, byte, bins, search);
  }
  FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  may_leave.most = &search->found;
  int64_t gone;
  return TakeRowsOut(may_leave, pins.clock, true, removed, &gone, stream);
}

int FusedrecDeviceTable::TakeExpiredOut(uint32_t clock, void* stream) {
  const HasExpired has_expired{PinsAt(clock, kNoAttempt), LimitsView()};
  int64_t gone = 0;
  RemovedRows removed(&allocator_);
  if (options_.record_tombstones || options_.averaged) {  // which list the rows that leave
    SelectScratch select(&allocator_);
    FUSEDREC_RETURN_IF_CUDA_ERROR(select.TakeFor(rows_.next, segments()));
    FUSEDREC_RETURN_IF_CUDA_ERROR(Count(has_expired, select, &gone, stream));
  }
  FUSEDREC_RETURN_IF_CUDA_ERROR(AllocateRemovedRows(gone, rows_.next, &removed));
  return TakeRowsOut(has_expired, clock, true, removed, &gone, stream);
}

int fusedrec_table_evict(FusedrecDeviceTable* table, int64_t segment, int64_t count, int64_t* gone, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (segment < 0 || segment >= table->segments()) return kCudaInvalidValue;
  const Pins pins = table->PinsAt(table->clock_, kNoAttempt);
  SelectScratch select(&table->allocator_);
  FUSEDREC_RETURN_IF_CUDA_ERROR(select.TakeFor(table->rows_.next, table->segments()));
  FUSEDREC_RETURN_IF_CUDA_ERROR(table->CountThatMayLeave(segment, pins, select, gone, stream));
  *gone = std::max<int64_t>(std::min(*gone, count), 0);
  FusedrecDeviceTable::RemovedRows removed(&table->allocator_);
  FUSEDREC_RETURN_IF_CUDA_ERROR(table->AllocateRemovedRows(*gone, table->rows_.next, &removed));
  FUSEDREC_RETURN_IF_CUDA_ERROR(table->EvictWorst(segment, *gone, pins, removed, stream));
  ++table->version_;
  return kCudaSuccess;
}

int fusedrec_table_remove(FusedrecDeviceTable* table, int64_t segment, const int64_t* ids, int64_t num_ids, int64_t* gone,
                          void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (segment < 0 || segment >= table->segments() || num_ids < 0 || num_ids > kDeviceTableMaxIds) return kCudaInvalidValue;
  if (table->waiting_.since != 0) return kDeviceWaiting;
  // Before rows are marked, because the next call would take the marks of a failed one for its own.
  FusedrecDeviceTable::RemovedRows removed(&table->allocator_);
  const int64_t most = std::min(num_ids, table->segments_[segment].size);
  FUSEDREC_RETURN_IF_CUDA_ERROR(table->AllocateRemovedRows(most, table->rows_.next, &removed));
  ++table->version_;
  if (num_ids > 0) {
    FUSEDREC_LAUNCH(MarkKernel, BlocksFor(num_ids, kSelectThreads), kSelectThreads, 0, stream, table->View(),
                    static_cast<uint32_t>(segment), ids, num_ids, table->PinsAt(table->clock_, kNoAttempt), false);
  }
  return table->TakeRowsOut(IsMarked{}, int64_t{table->clock_} + table->options_.window, false, removed, gone, stream);
}

int fusedrec_table_tombstones(FusedrecDeviceTable* table, int64_t segment, const FusedrecIdSink* sink, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (segment < 0 || segment >= table->segments()) return kCudaInvalidValue;
  std::vector<int64_t> ids = table->segments_[segment].left;
  KeepDistinct(&ids);
  std::vector<uint32_t> rows;
  FUSEDREC_RETURN_IF_CUDA_ERROR(table->FindRows(table->Views() + segment, ids, &rows, stream));
  int64_t kept = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (rows[i] == kNowhere) ids[kept++] = ids[i];
  }
  sink->take(sink->context, ids.data(), nullptr, kept);
  return kCudaSuccess;
}

int FusedrecDeviceTable::FindRows(const SegmentLines* lines, const std::vector<int64_t>& ids,
                                  std::vector<uint32_t>* rows, void* stream) const {
  const int64_t count = ids.size();
  rows->resize(count);
  if (count == 0) return kCudaSuccess;
  ScratchMemory memory(&allocator_);
  int64_t* wanted;
  uint32_t* found;
  FUSEDREC_RETURN_IF_CUDA_ERROR(memory.Take({{&wanted, count}, {&found, count}}));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(wanted, ids.data(), count, stream));
  FUSEDREC_LAUNCH(FindRowsKernel, BlocksFor(count, kSelectThreads), kSelectThreads, 0, stream, lines, wanted, count,
                  found);
  FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  return CopyToHost(rows->data(), found, count, stream);
}

void fusedrec_table_forget_tombstones(FusedrecDeviceTable* table) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  for (FusedrecDeviceTable::Segment& segment : table->segments_) segment.left.clear();
}

int fusedrec_table_keys(FusedrecDeviceTable* table, int64_t segment, int64_t lookups, int64_t version, int64_t most,
                        int64_t* ids, int64_t* handles, int64_t* count, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (segment < 0 || segment >= table->segments()) return kCudaInvalidValue;
  std::vector<int64_t> counts;
  const auto to = [&](unsigned long long*) { return Export{ids, handles, most}; };
  const HasChanged changed{static_cast<uint32_t>(segment),
                           {static_cast<uint32_t>(lookups), static_cast<uint32_t>(version)}};
  SelectScratch select(&table->allocator_);
  FUSEDREC_RETURN_IF_CUDA_ERROR(select.TakeFor(table->rows_.next, table->segments()));
  FUSEDREC_RETURN_IF_CUDA_ERROR(table->Select(changed, to, select, &counts, stream));
  *count = counts[0];
  return *count <= most ? kCudaSuccess : kDeviceMore;
}
