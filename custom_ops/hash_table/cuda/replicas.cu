// A table as one of several replicas that are averaged. replicas.h has the contract, replicas.cuh the kernels.
//
// A byte of each row says that it was trained since the last average. A row that leaves takes its byte along, into the
// list of the ids that left. So an id that left and came back counts as trained, as on the CPU.
#include "hash_table/cuda/replicas.cuh"

#include <algorithm>
#include <numeric>

#include "hash_table/cpu/rows/distinct_ids.h"
#include "hash_table/cuda/select_pass.cuh"
#include "hash_table/cuda/table.h"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

namespace {

// Sorts by id. One entry stays for an id that left several times, with all its notes.
void KeepDistinctLeft(std::vector<LeftRow>* left) {
  std::sort(left->begin(), left->end(), [](const LeftRow& a, const LeftRow& b) { return a.id < b.id; });
  size_t kept = 0;
  for (const LeftRow& row : *left) {
    if (kept > 0 && (*left)[kept - 1].id == row.id) {
      (*left)[kept - 1].noted |= row.noted;
    } else {
      (*left)[kept++] = row;
    }
  }
  left->resize(kept);
}

}  // namespace

int64_t FusedrecDeviceTable::width() const {
  return int64_t{layout_.dim} * (1 + layout_.wide_slots) + layout_.scalar_slots;
}

int FusedrecDeviceTable::NoteTrained(const FusedrecMessage& message, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!options_.averaged) return kCudaInvalidValue;
  Received received;
  FUSEDREC_RETURN_IF_CUDA_ERROR(Receive(message, &received, stream));
  if (received.view.num_ids > 0) {
    FUSEDREC_LAUNCH(NoteKernel, BlocksFor(received.view.num_ids, kThreads), kThreads, 0, stream, View(), received.view,
                    received.counts);
    FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  }
  Counts counts;
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(&counts, received.counts, 1, stream));
  return counts.bad != 0 ? kCudaInvalidValue : kCudaSuccess;
}

int FusedrecDeviceTable::TakeUnsynced(const FusedrecUnsyncedSink& sink, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!options_.averaged) return kCudaInvalidValue;
  std::vector<int64_t> head(2 * segments()), gone;
  std::vector<uint32_t> came_back;  // rows of ids that left after they were trained
  for (int64_t s = 0; s < segments(); ++s) {
    std::vector<LeftRow>& left = segments_[s].unsynced;
    KeepDistinctLeft(&left);
    std::vector<int64_t> ids;
    std::vector<uint32_t> rows;
    for (const LeftRow& row : left) ids.push_back(row.id);
    FUSEDREC_RETURN_IF_CUDA_ERROR(FindRows(Views() + s, ids, &rows, stream));
    for (size_t i = 0; i < left.size(); ++i) {
      if (rows[i] == kNowhere) gone.push_back(ids[i]);
      head[segments() + s] += rows[i] == kNowhere;
      if (rows[i] != kNowhere && left[i].noted != 0) came_back.push_back(rows[i]);
    }
  }
  const int64_t again = came_back.size();
  const Memory select = SelectMemory(rows_.next), noted(allocator_, again * sizeof(uint32_t));
  if (select.data() == nullptr || noted.data() == nullptr) return kDeviceOutOfMemory;
  if (again > 0) {
    uint32_t* const rows = reinterpret_cast<uint32_t*>(noted.data());
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(rows, came_back.data(), again, stream));
    FUSEDREC_LAUNCH(NoteRowsKernel, BlocksFor(again, kThreads), kThreads, 0, stream, View(), rows, again);
  }
  std::vector<int64_t> counts, taken;
  const auto count_of = [](unsigned long long* of) { return CountOf{of}; };
  FUSEDREC_RETURN_IF_CUDA_ERROR(Select(IsNoted{View(), kNobody}, count_of, select, &counts, stream));
  std::copy_n(counts.begin() + 1, segments(), head.begin());
  const int64_t trained = counts[0], n = trained + gone.size();
  int64_t *message = nullptr, *headers = nullptr;
  if (sink.allocate(sink.context, 2 * segments() + n, n, &message, &headers) != 0) return kDeviceOutOfMemory;
  int64_t* const ids = message + 2 * segments();
  int64_t begin = 0;
  for (int64_t s = 0; s < segments(); ++s) {
    if (counts[1 + s] == 0) continue;
    const auto take = [&](unsigned long long*) { return TakeNotes{View(), ids + begin, headers + begin}; };
    FUSEDREC_RETURN_IF_CUDA_ERROR(Select(IsNoted{View(), static_cast<uint32_t>(s)}, take, select, &taken, stream));
    begin += counts[1 + s];
  }
  for (Segment& segment : segments_) segment.unsynced.clear();
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(headers + trained, 0, (n - trained) * sizeof(int64_t), stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(message, head.data(), head.size(), stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(ids + trained, gone.data(), gone.size(), stream));
  return LastError();
}

int FusedrecDeviceTable::ReadNumbers(const int64_t* ids, const int64_t* splits, float* numbers, int64_t out_rows,
                                     void* stream) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t count = splits[segments()];
  if (!SplitsAreSound(splits, segments(), count) || count > kDeviceTableMaxIds || out_rows < count) {
    return kCudaInvalidValue;
  }
  if (out_rows == 0) return kCudaSuccess;
  Grouped grouped;
  FUSEDREC_RETURN_IF_CUDA_ERROR(FindGrouped(ids, splits, &grouped, stream));
  FUSEDREC_LAUNCH(ReadNumbersKernel, LoopBlocks(out_rows * width(), kThreads), kThreads, 0, stream, View(),
                  grouped.view, Initial(), grouped.found, count, out_rows * width(), width(), numbers);
  return LastError();
}

int FusedrecDeviceTable::FindGrouped(const int64_t* ids, const int64_t* splits, Grouped* grouped, void* stream) const {
  const int64_t count = splits[segments()];
  int64_t* device_splits = nullptr;
  const auto carve = [&](void* memory) {
    Carver carver(memory);
    device_splits = carver.Take<int64_t>(segments() + 1);
    grouped->absent_of = carver.Take<unsigned long long>(segments());
    grouped->found = carver.Take<uint32_t>(count);
    return carver.bytes();
  };
  grouped->memory = Memory(allocator_, carve(nullptr));
  if (grouped->memory.data() == nullptr) return kDeviceOutOfMemory;
  carve(grouped->memory.data());
  grouped->view = {ids, device_splits, segments()};
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(device_splits, splits, segments() + 1, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(grouped->absent_of, 0, segments() * sizeof(int64_t), stream));
  if (count == 0) return kCudaSuccess;
  FUSEDREC_LAUNCH(FindGroupedKernel, BlocksFor(count, kThreads), kThreads, 0, stream, View(), grouped->view, count,
                  grouped->found, grouped->absent_of);
  return LastError();
}

int FusedrecDeviceTable::Merge(const FusedrecMerge& in, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t num_left = in.left_splits[segments()], count = in.id_splits[segments()];
  if (!options_.averaged || !SplitsAreSound(in.left_splits, segments(), num_left) ||
      !SplitsAreSound(in.id_splits, segments(), count) || num_left > kDeviceTableMaxIds || count > kDeviceTableMaxIds) {
    return kCudaInvalidValue;
  }
  std::vector<int64_t> ids(count);
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(ids.data(), in.ids, count, stream));
  for (int64_t s = 0; s < segments(); ++s) {
    const int64_t begin = in.id_splits[s];
    if (FirstRepeat(ids.data() + begin, in.id_splits[s + 1] - begin) >= 0) return kDeviceDoubled;
  }
  // All memory, before a row changes.
  Imported imported;
  FUSEDREC_RETURN_IF_CUDA_ERROR(ReceiveGrouped(in.ids, in.id_splits, &imported, stream));
  Grouped grouped;
  FUSEDREC_RETURN_IF_CUDA_ERROR(FindGrouped(in.ids, in.id_splits, &grouped, stream));
  std::vector<int64_t> more(segments());
  const std::vector<int64_t> none(segments(), 0);
  FUSEDREC_RETURN_IF_CUDA_ERROR(
      CopyToHost(more.data(), reinterpret_cast<int64_t*>(grouped.absent_of), segments(), stream));
  const int64_t made = std::accumulate(more.begin(), more.end(), int64_t{0});
  FUSEDREC_RETURN_IF_CUDA_ERROR(MakeRoom(more, none.data(), Moves(), clock_, false, stream));
  const Memory scratch = AdmitMemory(count, false);
  int64_t most = num_left;  // rows that leave in one pass: an import may have brought more than max_rows
  for (int64_t s = 0; s < segments(); ++s) {
    if (limits_[s].max_rows > 0) most = std::max(most, segments_[s].size + more[s] - limits_[s].max_rows);
  }
  RemovedRows removed;
  FUSEDREC_RETURN_IF_CUDA_ERROR(AllocateRemovedRows(most, rows_.next + made, &removed));
  if (scratch.data() == nullptr) return kDeviceOutOfMemory;

  ++version_;
  const Pins pins = PinsAt(clock_, kNoAttempt);
  for (int64_t s = 0; s < segments(); ++s) {
    const int64_t begin = in.left_splits[s], leave = in.left_splits[s + 1] - begin;
    if (leave == 0) continue;
    FUSEDREC_LAUNCH(MarkKernel, BlocksFor(leave, kSelectThreads), kSelectThreads, 0, stream, View(),
                    static_cast<uint32_t>(s), in.left + begin, leave, pins, true);
  }
  int64_t gone;
  removed.replicas_know = true;
  if (num_left > 0) FUSEDREC_RETURN_IF_CUDA_ERROR(TakeRowsOut(IsMarked{}, clock_, false, removed, &gone, stream));
  removed.replicas_know = false;
  if (count > 0) {
    std::vector<int64_t> before;
    for (const Segment& segment : segments_) before.push_back(segment.size);
    int64_t written;
    FUSEDREC_RETURN_IF_CUDA_ERROR(Admit(imported.received, clock_, version_, false, scratch, imported.inverse,
                                        imported.handles, &written, stream));
    for (int64_t s = 0; s < segments(); ++s) segments_[s].inserts += segments_[s].size - before[s];
    FUSEDREC_LAUNCH(MergeKernel, LoopBlocks(count * width(), kThreads), kThreads, 0, stream, View(), imported.handles,
                    imported.inverse, count, width(), in.numbers, in.headers, version_,
                    static_cast<uint32_t>(in.step));
    FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  }
  // Each replica has kept its limit, but not with the same rows.
  for (int64_t s = 0; s < segments(); ++s) {
    const int64_t max_rows = limits_[s].max_rows, excess = max_rows > 0 ? segments_[s].size - max_rows : 0;
    if (excess <= 0) continue;
    int64_t may_leave;
    FUSEDREC_RETURN_IF_CUDA_ERROR(CountThatMayLeave(s, pins, removed.select, &may_leave, stream));
    FUSEDREC_RETURN_IF_CUDA_ERROR(EvictWorst(s, std::min(may_leave, excess), pins, removed, stream));
    if (may_leave < excess) {
      full_segment_ = s;
      return kDeviceTableFull;
    }
  }
  return kCudaSuccess;
}
