// A table as one of several replicas that are averaged. replicas.h has the contract.
//
// A byte of each row says that it was trained since the last average. A row that leaves takes its byte along, into the
// list of the ids that left. So an id that left and came back counts as trained, as on the CPU.
#include <numeric>

#include "hash_table/cpu/rows/distinct_ids.h"
#include "hash_table/cuda/select.cuh"
#include "hash_table/cuda/table_memory.h"

namespace {

FUSEDREC_KERNEL NoteKernel(TableView table, MessageView message, const Counts* counts) {
  if (counts->bad != 0) return;
  const uint32_t row = FindReceived(table, message, GlobalThread());
  if (row != kNowhere) *table.Note(row) = 1;
}

FUSEDREC_KERNEL NoteRowsKernel(TableView table, const uint32_t* __restrict__ rows, int64_t num_rows) {
  const int64_t n = GlobalThread();
  if (n < num_rows) *table.Note(rows[n]) = 1;
}

// Rows that were trained, of one segment; kNobody: of all.
struct IsNoted {
  TableView table;
  uint32_t segment;

  __device__ bool operator()(uint32_t row, const RowMeta& meta) const {
    return meta.segment != kNobody && (segment == kNobody || meta.segment == segment) && *table.Note(row) != 0;
  }
};
struct CountOf {
  unsigned long long* of;  // [segments]

  __device__ void operator()(uint32_t, RowMeta* meta, int64_t) const { atomicAdd(&of[meta->segment], 1ull); }
};
struct TakeNotes {
  TableView table;
  int64_t *ids, *headers;

  __device__ void operator()(uint32_t row, RowMeta* meta, int64_t rank) const {
    ids[rank] = meta->id;
    headers[rank] = static_cast<int64_t>(static_cast<uint64_t>(meta->last) << 32 | meta->count);
    *table.Note(row) = 0;
  }
};

// found [num_ids]: rows of ids, kNowhere without one. absent_of [segments] counts those without.
FUSEDREC_KERNEL FindGroupedKernel(TableView table, GroupedIds grouped, int64_t num_ids, uint32_t* __restrict__ found,
                                  unsigned long long* __restrict__ absent_of) {
  const int64_t n = GlobalThread();
  const bool active = n < num_ids;
  const int64_t segment = active ? grouped.SegmentOf(n) : 0, id = active ? grouped.ids[n] : 0;
  const uint32_t row = FindRow(active ? table.segments + segment : nullptr, id, TableHash(id));
  if (!active) return;
  found[n] = row;
  if (row == kNowhere) atomicAdd(&absent_of[segment], 1ull);
}

// numbers [out_rows, width]: embedding, element-wise slots and row-wise slots of each id's row, or of its initial row,
// as if read from a row of the table; zeros after the ids.
FUSEDREC_KERNEL ReadNumbersKernel(TableView table, GroupedIds grouped, InitialValues initial,
                                  const uint32_t* __restrict__ found, int64_t num_ids, int64_t out_numbers,
                                  int64_t width, float* __restrict__ numbers) {
  const RowLayout& layout = table.cold_layout;
  const int wide = layout.dim * (1 + layout.wide_slots);
  for (int64_t i = GlobalThread(); i < out_numbers; i += GridThreads()) {
    const int64_t n = i / width;
    const int j = static_cast<int>(i % width);
    float x = 0.0f;
    if (n < num_ids && found[n] != kNowhere) {
      x = table.At(found[n]).Load(j);
    } else if (n < num_ids && j < layout.dim) {
      const Four bits = InitialBits(initial.seeds[grouped.SegmentOf(n)], grouped.ids[n], static_cast<uint32_t>(j / 4));
      const float number = InitialNumber(initial.distribution, initial.a, initial.b, bits.number[j % 4]);
      x = AsStored(layout, layout.storage, number, static_cast<uint32_t>(j));
    } else if (n < num_ids) {
      x = initial.slots[j < wide ? j / layout.dim - 1 : layout.wide_slots + j - wide];
      if (j < wide) x = AsStored(layout, layout.slot_storage, x, static_cast<uint32_t>(j));
    }
    numbers[i] = x;
  }
}

__device__ inline uint32_t Larger(uint32_t a, uint32_t b) { return a < b ? b : a; }

// The rows of handles[inverse[n]] get numbers [count, width] and the counters of headers. The count may be smaller, of a
// row that has left other replicas and come back. A row that was looked up later than `last` keeps that clock, which its
// pin needs, and the larger count.
FUSEDREC_KERNEL MergeKernel(TableView table, const int64_t* __restrict__ handles, const int32_t* __restrict__ inverse,
                            int64_t count, int64_t width, const float* __restrict__ numbers,
                            const int64_t* __restrict__ headers, uint32_t version, uint32_t step) {
  for (int64_t i = GlobalThread(); i < count * width; i += GridThreads()) {
    const int64_t n = i / width;
    const int j = static_cast<int>(i % width);
    const uint32_t number = static_cast<uint32_t>(handles[inverse[n]]);
    table.At(number).Store(numbers[i], j, step);
    if (j != 0) continue;
    RowMeta* const meta = table.Meta(number);
    const uint32_t last = static_cast<uint32_t>(static_cast<uint64_t>(headers[n]) >> 32);
    const uint32_t replicas_count = static_cast<uint32_t>(headers[n]);
    meta->count = meta->last < last ? replicas_count : Larger(meta->count, replicas_count);
    meta->last = Larger(meta->last, last);
    meta->updated = version;
  }
}

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

int fusedrec_table_note_trained(FusedrecDeviceTable* table, const FusedrecMessage* message, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  Received received(&table->allocator_);
  FUSEDREC_TRY(table->Receive(*message, &received, stream));
  FUSEDREC_FOR_EACH(NoteKernel, received.view.num_ids, stream, table->View(), received.view, received.counts);
  FUSEDREC_TRY(LastError());
  Counts counts;
  FUSEDREC_TRY(CopyToHost(&counts, received.counts, 1, stream));
  return counts.bad != 0 ? kCudaInvalidValue : kCudaSuccess;
}

int fusedrec_table_take_unsynced(FusedrecDeviceTable* table, const FusedrecUnsyncedSink* sink, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  std::vector<int64_t> head(2 * table->segments()), gone;
  std::vector<uint32_t> came_back;  // rows of ids that left after they were trained
  for (int64_t s = 0; s < table->segments(); ++s) {
    std::vector<LeftRow>& left = table->segments_[s].unsynced;
    KeepDistinctLeft(&left);
    std::vector<int64_t> ids;
    std::vector<uint32_t> rows;
    for (const LeftRow& row : left) ids.push_back(row.id);
    FUSEDREC_TRY(table->FindRows(table->views_.data() + s, ids, &rows, stream));
    for (size_t i = 0; i < left.size(); ++i) {
      if (rows[i] == kNowhere) gone.push_back(ids[i]);
      head[table->segments() + s] += rows[i] == kNowhere;
      if (rows[i] != kNowhere && left[i].noted != 0) came_back.push_back(rows[i]);
    }
  }
  const int64_t again = came_back.size();
  SelectScratch select(&table->allocator_);
  ScratchMemory noted(&table->allocator_);
  uint32_t* rows;
  FUSEDREC_TRY(select.TakeFor(table->rows_.next, table->segments()));
  FUSEDREC_TRY(noted.Take({{&rows, again}}));
  FUSEDREC_TRY(CopyToDevice(rows, came_back.data(), again, stream));
  FUSEDREC_FOR_EACH(NoteRowsKernel, again, stream, table->View(), rows, again);
  std::vector<int64_t> counts, taken;
  const auto count_of = [](unsigned long long* of) { return CountOf{of}; };
  FUSEDREC_TRY(table->Select(IsNoted{table->View(), kNobody}, count_of, select, &counts, stream));
  std::copy_n(counts.begin() + 1, table->segments(), head.begin());
  const int64_t trained = counts[0], n = trained + gone.size();
  int64_t *message = nullptr, *headers = nullptr;
  if (sink->allocate(sink->context, 2 * table->segments() + n, n, &message, &headers) != 0) return kDeviceOutOfMemory;
  int64_t* const ids = message + 2 * table->segments();
  int64_t begin = 0;
  for (int64_t s = 0; s < table->segments(); ++s) {
    if (counts[1 + s] == 0) continue;
    const auto take = [&](unsigned long long*) { return TakeNotes{table->View(), ids + begin, headers + begin}; };
    const IsNoted of_segment{table->View(), static_cast<uint32_t>(s)};
    FUSEDREC_TRY(table->Select(of_segment, take, select, &taken, stream));
    begin += counts[1 + s];
  }
  for (FusedrecDeviceTable::Segment& segment : table->segments_) segment.unsynced.clear();
  FUSEDREC_TRY(Fill(headers + trained, 0, (n - trained) * sizeof(int64_t), stream));
  FUSEDREC_TRY(CopyToDevice(message, head.data(), head.size(), stream));
  FUSEDREC_TRY(CopyToDevice(ids + trained, gone.data(), gone.size(), stream));
  return LastError();
}

int fusedrec_table_read_numbers(FusedrecDeviceTable* table, const int64_t* ids, const int64_t* splits, float* numbers,
                                int64_t out_rows, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  const int64_t count = splits[table->segments()];
  if (count > kDeviceTableMaxIds) return kCudaInvalidValue;
  if (out_rows == 0) return kCudaSuccess;
  FusedrecDeviceTable::Grouped grouped(&table->allocator_);
  FUSEDREC_TRY(table->FindGrouped(ids, splits, &grouped, stream));
  FUSEDREC_LOOP(ReadNumbersKernel, out_rows * table->width(), stream, table->View(), grouped.view, table->Initial(),
                grouped.found, count, out_rows * table->width(), table->width(), numbers);
  return LastError();
}

int FusedrecDeviceTable::FindGrouped(const int64_t* ids, const int64_t* splits, Grouped* grouped, void* stream) const {
  const int64_t count = splits[segments()];
  int64_t* device_splits;
  FUSEDREC_TRY(grouped->Take({{&device_splits, segments() + 1}, {&grouped->absent_of, segments()},
                               {&grouped->found, count}}));
  grouped->view = {ids, device_splits, segments()};
  FUSEDREC_TRY(CopyToDevice(device_splits, splits, segments() + 1, stream));
  FUSEDREC_TRY(Fill(grouped->absent_of, 0, segments() * sizeof(int64_t), stream));
  if (count == 0) return kCudaSuccess;
  FUSEDREC_FOR_EACH(FindGroupedKernel, count, stream, View(), grouped->view, count, grouped->found, grouped->absent_of);
  return LastError();
}

int fusedrec_table_merge(FusedrecDeviceTable* table, const FusedrecMerge* merge, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  const int64_t num_left = merge->left_splits[table->segments()], count = merge->id_splits[table->segments()];
  if (num_left > kDeviceTableMaxIds || count > kDeviceTableMaxIds) return kCudaInvalidValue;
  std::vector<int64_t> ids(count);
  FUSEDREC_TRY(CopyToHost(ids.data(), merge->ids, count, stream));
  for (int64_t s = 0; s < table->segments(); ++s) {
    const int64_t begin = merge->id_splits[s];
    if (FirstRepeat(ids.data() + begin, merge->id_splits[s + 1] - begin) >= 0) return kDeviceDoubled;
  }
  // All memory, before a row changes.
  FusedrecDeviceTable::Imported imported(&table->allocator_);
  FUSEDREC_TRY(table->ReceiveGrouped(merge->ids, merge->id_splits, &imported, stream));
  FusedrecDeviceTable::Grouped grouped(&table->allocator_);
  FUSEDREC_TRY(table->FindGrouped(merge->ids, merge->id_splits, &grouped, stream));
  std::vector<int64_t> more(table->segments());
  const std::vector<int64_t> none(table->segments(), 0);
  FUSEDREC_TRY(CopyToHost(more.data(), reinterpret_cast<int64_t*>(grouped.absent_of), table->segments(), stream));
  const int64_t made = std::accumulate(more.begin(), more.end(), int64_t{0});
  FUSEDREC_TRY(table->MakeRoom(more, none.data(), {}, table->clock_, false, stream));
  AdmitScratch scratch(&table->allocator_);
  FUSEDREC_TRY(scratch.TakeFor(count, false));
  int64_t most = num_left;  // rows that leave in one pass: an import may have brought more than max_rows
  for (int64_t s = 0; s < table->segments(); ++s) {
    if (table->limits_[s].max_rows > 0) most = std::max(most, table->segments_[s].size + more[s] - table->limits_[s].max_rows);
  }
  FusedrecDeviceTable::RemovedRows removed(&table->allocator_);
  FUSEDREC_TRY(table->AllocateRemovedRows(most, table->rows_.next + made, &removed));

  ++table->version_;
  const Pins pins = table->PinsAt(table->clock_, kNoAttempt);
  for (int64_t s = 0; s < table->segments(); ++s) {
    const int64_t begin = merge->left_splits[s], leave = merge->left_splits[s + 1] - begin;
    if (leave == 0) continue;
    FUSEDREC_FOR_EACH(MarkKernel, leave, stream, table->View(), static_cast<uint32_t>(s), merge->left + begin, leave,
                      pins, true);
  }
  int64_t gone;
  removed.replicas_know = true;
  if (num_left > 0) {
    FUSEDREC_TRY(table->TakeRowsOut(IsMarked{}, pins.clock - pins.window, false, removed, &gone, stream));
  }
  removed.replicas_know = false;
  if (count > 0) {
    std::vector<int64_t> before;
    for (const FusedrecDeviceTable::Segment& segment : table->segments_) before.push_back(segment.size);
    int64_t written;
    FUSEDREC_TRY(table->Admit(imported, table->clock_, table->version_, false, scratch, imported.inverse,
                              imported.handles, &written, stream));
    for (int64_t s = 0; s < table->segments(); ++s) table->segments_[s].inserts += table->segments_[s].size - before[s];
    FUSEDREC_LOOP(MergeKernel, count * table->width(), stream, table->View(), imported.handles, imported.inverse, count,
                  table->width(), merge->numbers, merge->headers, table->version_, static_cast<uint32_t>(merge->step));
    FUSEDREC_TRY(LastError());
  }
  // Each replica has kept its limit, but not with the same rows.
  int answer = kCudaSuccess;
  for (int64_t s = table->segments() - 1; s >= 0; --s) {
    const int64_t max_rows = table->limits_[s].max_rows, excess = max_rows > 0 ? table->segments_[s].size - max_rows : 0;
    if (excess <= 0) continue;
    int64_t may_leave;
    FUSEDREC_TRY(table->CountThatMayLeave(s, pins, removed, &may_leave, stream));
    FUSEDREC_TRY(table->EvictWorst(s, std::min(may_leave, excess), pins, removed, stream));
    if (may_leave < excess) {
      table->full_segment_ = s;
      answer = kDeviceTableFull;
    }
  }
  return answer;
}
