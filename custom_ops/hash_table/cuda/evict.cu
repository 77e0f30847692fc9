// Rows that leave, and lists of rows; select.cuh says how they are found.
#include <algorithm>

#include "hash_table/cpu/rows/distinct_ids.h"
#include "hash_table/cuda/lowest.cuh"
#include "hash_table/cuda/select_pass.cuh"
#include "hash_table/cuda/table.h"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

namespace {

constexpr unsigned kMostBlocks = 132 * 16;

// Device memory of the search for the rows that rank lowest.
struct WorstScratch {
  explicit WorstScratch(void* memory) : carver(memory) {
    search = carver.Take<Search>(1);
    bins = carver.Take<unsigned>(256);
  }
  Carver carver;
  Search* search;
  unsigned* bins;
};

}  // namespace

Memory FusedrecDeviceTable::SelectMemory(int64_t num_rows) const {
  return Memory(allocator_, SelectScratch(nullptr, num_rows, segments()).carver.bytes());
}

int FusedrecDeviceTable::AllocateRemovedRows(int64_t most, int64_t num_rows, RemovedRows* removed) const {
  removed->worst = Memory(allocator_, WorstScratch(nullptr).carver.bytes());
  removed->select = SelectMemory(num_rows);
  if (removed->worst.data() == nullptr || removed->select.data() == nullptr) return kDeviceOutOfMemory;
  if (!options_.record_tombstones && !options_.averaged) return kCudaSuccess;
  removed->left = Memory(allocator_, most * sizeof(LeftRow));
  return removed->left.data() == nullptr ? kDeviceOutOfMemory : kCudaSuccess;
}

int FusedrecDeviceTable::CountThatMayLeave(int64_t segment, const Pins& pins, const Memory& select, int64_t* count,
                                           void* stream) const {
  *count = 0;
  if (limits_[segment].eviction == Eviction::kNone) return kCudaSuccess;
  const MayLeave may_leave{static_cast<uint32_t>(segment), limits_[segment], pins, nullptr};
  return Count(may_leave, select, count, stream);
}

int FusedrecDeviceTable::EvictWorst(int64_t segment, int64_t count, const Pins& pins, const RemovedRows& removed,
                                    void* stream) {
  if (count <= 0) return kCudaSuccess;
  const Memory& worst = removed.worst;
  const WorstScratch at(worst.data());
  Search* const search = at.search;
  unsigned* const bins = at.bins;
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(worst.data(), 0, worst.bytes(), stream));
  const unsigned long long wanted = static_cast<unsigned long long>(count);
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(&search->count, &wanted, 1, stream));
  MayLeave may_leave{static_cast<uint32_t>(segment), limits_[segment], pins, nullptr};
  const unsigned blocks = std::min(BlocksFor(rows_.next, kSelectThreads), kMostBlocks);
  for (int byte = limits_[segment].eviction == Eviction::kLfu ? 0 : 4; byte < kScoreBytes; ++byte) {  // clocks have 32 bits
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
  RemovedRows removed;
  if (options_.record_tombstones || options_.averaged) {  // which list the rows that leave
    FUSEDREC_RETURN_IF_CUDA_ERROR(Count(has_expired, SelectMemory(rows_.next), &gone, stream));
  }
  FUSEDREC_RETURN_IF_CUDA_ERROR(AllocateRemovedRows(gone, rows_.next, &removed));
  return TakeRowsOut(has_expired, clock, true, removed, &gone, stream);
}

int FusedrecDeviceTable::Evict(int64_t segment, int64_t count, int64_t* gone, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (segment < 0 || segment >= segments()) return kCudaInvalidValue;
  const Pins pins = PinsAt(clock_, kNoAttempt);
  FUSEDREC_RETURN_IF_CUDA_ERROR(CountThatMayLeave(segment, pins, SelectMemory(rows_.next), gone, stream));
  *gone = std::max<int64_t>(std::min(*gone, count), 0);
  RemovedRows removed;
  FUSEDREC_RETURN_IF_CUDA_ERROR(AllocateRemovedRows(*gone, rows_.next, &removed));
  FUSEDREC_RETURN_IF_CUDA_ERROR(EvictWorst(segment, *gone, pins, removed, stream));
  ++version_;
  return kCudaSuccess;
}

int FusedrecDeviceTable::Remove(int64_t segment, const int64_t* ids, int64_t num_ids, int64_t* gone, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (segment < 0 || segment >= segments() || num_ids < 0 || num_ids > kDeviceTableMaxIds) return kCudaInvalidValue;
  if (waiting_.since != 0) return kDeviceWaiting;
  // Before rows are marked, because the next call would take the marks of a failed one for its own.
  RemovedRows removed;
  FUSEDREC_RETURN_IF_CUDA_ERROR(AllocateRemovedRows(std::min(num_ids, segments_[segment].size), rows_.next, &removed));
  ++version_;
  if (num_ids > 0) {
    FUSEDREC_LAUNCH(MarkKernel, BlocksFor(num_ids, kSelectThreads), kSelectThreads, 0, stream, View(),
                    static_cast<uint32_t>(segment), ids, num_ids, PinsAt(clock_, kNoAttempt), false);
  }
  return TakeRowsOut(IsMarked{}, int64_t{clock_} + options_.window, false, removed, gone, stream);
}

int FusedrecDeviceTable::Tombstones(int64_t segment, const FusedrecIdSink& sink, void* stream) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (segment < 0 || segment >= segments()) return kCudaInvalidValue;
  std::vector<int64_t> ids = segments_[segment].left;
  KeepDistinct(&ids);
  std::vector<uint32_t> rows;
  FUSEDREC_RETURN_IF_CUDA_ERROR(FindRows(Views() + segment, ids, &rows, stream));
  int64_t kept = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (rows[i] == kNowhere) ids[kept++] = ids[i];
  }
  sink.take(sink.context, ids.data(), nullptr, kept);
  return kCudaSuccess;
}

int FusedrecDeviceTable::FindRows(const SegmentLines* lines, const std::vector<int64_t>& ids,
                                  std::vector<uint32_t>* rows, void* stream) const {
  const int64_t count = ids.size();
  rows->resize(count);
  if (count == 0) return kCudaSuccess;
  Carver carver(nullptr);
  carver.Take<int64_t>(count);
  carver.Take<uint32_t>(count);
  const Memory memory(allocator_, carver.bytes());
  if (memory.data() == nullptr) return kDeviceOutOfMemory;
  Carver at(memory.data());
  int64_t* const wanted = at.Take<int64_t>(count);
  uint32_t* const found = at.Take<uint32_t>(count);
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(wanted, ids.data(), count, stream));
  FUSEDREC_LAUNCH(FindRowsKernel, BlocksFor(count, kSelectThreads), kSelectThreads, 0, stream, lines, wanted, count,
                  found);
  FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  return CopyToHost(rows->data(), found, count, stream);
}

void FusedrecDeviceTable::ForgetTombstones() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Segment& segment : segments_) segment.left.clear();
}

int FusedrecDeviceTable::Keys(int64_t segment, int64_t lookups, int64_t version, int64_t most, int64_t* ids,
                              int64_t* handles, int64_t* count, void* stream) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (segment < 0 || segment >= segments()) return kCudaInvalidValue;
  std::vector<int64_t> counts;
  const auto to = [&](unsigned long long*) { return Export{ids, handles, most}; };
  const HasChanged changed{static_cast<uint32_t>(segment), static_cast<uint32_t>(lookups),
                           static_cast<uint32_t>(version)};
  FUSEDREC_RETURN_IF_CUDA_ERROR(Select(changed, to, SelectMemory(rows_.next), &counts, stream));
  *count = counts[0];
  return *count <= most ? kCudaSuccess : kDeviceMore;
}
