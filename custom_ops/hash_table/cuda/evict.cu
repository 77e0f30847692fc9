// Rows that leave, and lists of rows: by the rank of a policy (select.cuh says how they are found), or by their ids.

#include "hash_table/cpu/rows/distinct_ids.h"
#include "hash_table/cuda/select.cuh"
#include "hash_table/cuda/table_memory.h"

namespace {

// bins [256]: rows that may leave and agree with the bytes found so far, by their next byte.
FUSEDREC_KERNEL CountBytesKernel(TableView table, int64_t num_rows, MayLeave may_leave, const Search* search, int byte,
                                 unsigned* bins) {
  FUSEDREC_SHARED(unsigned, own, 256);
  own[threadIdx.x] = 0;
  __syncthreads();
  for (int64_t row = GlobalThread(); row < num_rows; row += GridThreads()) {
    const RowMeta& meta = *table.Meta(static_cast<uint32_t>(row));
    if (!may_leave(static_cast<uint32_t>(row), meta)) continue;
    const Score score = may_leave.Of(meta);
    if (score.Agrees(search->found, byte)) atomicAdd(&own[score.Byte(byte)], 1u);
  }
  __syncthreads();
  if (own[threadIdx.x] != 0) atomicAdd(&bins[threadIdx.x], own[threadIdx.x]);
}

// The next byte belongs to the bin in which the count is reached. Clears the bins.
FUSEDREC_KERNEL ChooseByteKernel(int byte, unsigned* bins, Search* search) {
  FUSEDREC_SHARED(unsigned, warp_sums, 8);
  const unsigned mine = bins[threadIdx.x];
  const unsigned long long count = search->count;
  unsigned until = WarpInclusiveSum(mine);
  if (Lane() == 31) warp_sums[Warp()] = until;
  __syncthreads();  // also: all have read the count
  for (int w = 0; w < Warp(); ++w) until += warp_sums[w];
  if (until - mine < count && count <= until) {  // one thread
    const unsigned long long bits = static_cast<unsigned long long>(threadIdx.x) << (56 - byte % 8 * 8);
    (byte < 8 ? search->found.high : search->found.low) |= bits;
    search->count = count - (until - mine);
  }
  bins[threadIdx.x] = 0;
}

// found [num_ids]: rows of ids of one segment, whose lines these are; kNowhere without one.
FUSEDREC_KERNEL FindRowsKernel(const SegmentLines* lines, const int64_t* __restrict__ ids, int64_t num_ids,
                               uint32_t* __restrict__ found) {
  const int64_t n = GlobalThread();
  const bool active = n < num_ids;
  const int64_t id = active ? ids[n] : 0;
  const uint32_t row = FindRow(active ? lines : nullptr, id, TableHash(id));
  if (active) found[n] = row;
}

}  // namespace

int SelectScratch::TakeFor(int64_t num_rows, int64_t segments) {
  // A tile takes the pass to its end where there are no rows.
  tiles = std::max<int64_t>((num_rows + kThreads - 1) / kThreads, 1);
  return Take({{&states, tiles}, {&next_tile, 1}, {&selected, 1 + segments + 2}});
}

int FusedrecDeviceTable::AllocateRemovedRows(int64_t most, int64_t num_rows, RemovedRows* removed) const {
  FUSEDREC_TRY(removed->Take({{&removed->search, 1}, {&removed->bins, 256}}));
  FUSEDREC_TRY(removed->TakeFor(num_rows, segments()));
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
  FUSEDREC_TRY(Fill(search, 0, BytesBetween(search, bins + 256), stream));
  const unsigned long long wanted = static_cast<unsigned long long>(count);
  FUSEDREC_TRY(CopyToDevice(&search->count, &wanted, 1, stream));
  MayLeave may_leave{static_cast<uint32_t>(segment), limits_[segment], pins, nullptr};
  for (int byte = limits_[segment].eviction == Eviction::kLru ? 4 : 0; byte < kScoreBytes; ++byte) {  // clocks have 32 bits
    FUSEDREC_LOOP(CountBytesKernel, rows_.next, stream, View(), rows_.next, may_leave, search, byte, bins);
    FUSEDREC_LAUNCH(ChooseByteKernel, 1u, kThreads, 0, stream, byte, bins, search);
  }
  FUSEDREC_TRY(LastError());
  may_leave.most = &search->found;
  int64_t gone;
  return TakeRowsOut(may_leave, pins.clock - pins.window, true, removed, &gone, stream);
}

int FusedrecDeviceTable::TakeExpiredOut(uint32_t clock, void* stream) {
  const Pins pins = PinsAt(clock, kNoAttempt);
  const HasExpired has_expired{pins, limits_view_.data()};
  int64_t gone = 0;
  RemovedRows removed(&allocator_);
  if (options_.record_tombstones || options_.averaged) {  // which list the rows that leave
    SelectScratch select(&allocator_);
    FUSEDREC_TRY(select.TakeFor(rows_.next, segments()));
    FUSEDREC_TRY(Count(has_expired, select, &gone, stream));
  }
  FUSEDREC_TRY(AllocateRemovedRows(gone, rows_.next, &removed));
  return TakeRowsOut(has_expired, clock - pins.window, true, removed, &gone, stream);
}

int fusedrec_table_evict(FusedrecDeviceTable* table, int64_t segment, int64_t count, int64_t* gone, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  const Pins pins = table->PinsAt(table->clock_, kNoAttempt);
  SelectScratch select(&table->allocator_);
  FUSEDREC_TRY(select.TakeFor(table->rows_.next, table->segments()));
  FUSEDREC_TRY(table->CountThatMayLeave(segment, pins, select, gone, stream));
  *gone = std::max<int64_t>(std::min(*gone, count), 0);
  FusedrecDeviceTable::RemovedRows removed(&table->allocator_);
  FUSEDREC_TRY(table->AllocateRemovedRows(*gone, table->rows_.next, &removed));
  FUSEDREC_TRY(table->EvictWorst(segment, *gone, pins, removed, stream));
  ++table->version_;
  return kCudaSuccess;
}

int fusedrec_table_remove(FusedrecDeviceTable* table, int64_t segment, const int64_t* ids, int64_t num_ids, int64_t* gone,
                          void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (num_ids > kDeviceTableMaxIds) return kCudaInvalidValue;
  if (table->waiting_.since != 0) return kDeviceWaiting;
  // Before rows are marked, because the next call would take the marks of a failed one for its own.
  FusedrecDeviceTable::RemovedRows removed(&table->allocator_);
  const int64_t most = std::min(num_ids, table->segments_[segment].size);
  FUSEDREC_TRY(table->AllocateRemovedRows(most, table->rows_.next, &removed));
  ++table->version_;
  FUSEDREC_FOR_EACH(MarkKernel, num_ids, stream, table->View(), static_cast<uint32_t>(segment), ids, num_ids,
                    table->PinsAt(table->clock_, kNoAttempt), false);
  return table->TakeRowsOut(IsMarked{}, table->clock_, false, removed, gone, stream);
}

int fusedrec_table_tombstones(FusedrecDeviceTable* table, int64_t segment, const FusedrecIdSink* sink, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  std::vector<int64_t> ids = table->segments_[segment].left;
  KeepDistinct(&ids);
  std::vector<uint32_t> rows;
  FUSEDREC_TRY(table->FindRows(table->views_.data() + segment, ids, &rows, stream));
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
  FUSEDREC_TRY(memory.Take({{&wanted, count}, {&found, count}}));
  FUSEDREC_TRY(CopyToDevice(wanted, ids.data(), count, stream));
  FUSEDREC_FOR_EACH(FindRowsKernel, count, stream, lines, wanted, count, found);
  FUSEDREC_TRY(LastError());
  return CopyToHost(rows->data(), found, count, stream);
}

void fusedrec_table_forget_tombstones(FusedrecDeviceTable* table) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  for (FusedrecDeviceTable::Segment& segment : table->segments_) segment.left.clear();
}

int fusedrec_table_keys(FusedrecDeviceTable* table, int64_t segment, int64_t lookups, int64_t version, int64_t most,
                        int64_t* ids, int64_t* handles, int64_t* count, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  std::vector<int64_t> counts;
  const auto to = [&](unsigned long long*) { return Export{ids, handles, most}; };
  const HasChanged changed{static_cast<uint32_t>(segment),
                           {static_cast<uint32_t>(lookups), static_cast<uint32_t>(version)}};
  SelectScratch select(&table->allocator_);
  FUSEDREC_TRY(select.TakeFor(table->rows_.next, table->segments()));
  FUSEDREC_TRY(table->Select(changed, to, select, &counts, stream));
  *count = counts[0];
  return *count <= most ? kCudaSuccess : kDeviceMore;
}
