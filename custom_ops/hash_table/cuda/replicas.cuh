// Kernels of a table whose replicas are averaged (replicas.h): rows that were trained since the last average, numbers of
// rows to and from the average.
#pragma once

#include "hash_table/cuda/message.cuh"
#include "hash_table/cuda/select.cuh"

namespace fusedrec {
namespace device_table {

// Notes that the rows of a message's ids were trained.
static __global__ void __launch_bounds__(kThreads)
    NoteKernel(TableView table, MessageView message, const Counts* counts) {
  if (counts->bad != 0) return;
  const uint32_t row = FindReceived(table, message, GlobalThread());
  if (row != kNowhere) *table.Note(row) = 1;
}

static __global__ void __launch_bounds__(kThreads)
    NoteRowsKernel(TableView table, const uint32_t* __restrict__ rows, int64_t num_rows) {
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
static __global__ void __launch_bounds__(kThreads)
    FindGroupedKernel(TableView table, GroupedIds grouped, int64_t num_ids, uint32_t* __restrict__ found,
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
static __global__ void __launch_bounds__(kThreads)
    ReadNumbersKernel(TableView table, GroupedIds grouped, InitialValues initial, const uint32_t* __restrict__ found,
                      int64_t num_ids, int64_t out_numbers, int64_t width, float* __restrict__ numbers) {
  const RowLayout& layout = table.cold_layout;
  const int wide = layout.dim * (1 + layout.wide_slots);
  for (int64_t i = GlobalThread(); i < out_numbers; i += static_cast<int64_t>(gridDim.x) * kThreads) {
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
static __global__ void __launch_bounds__(kThreads)
    MergeKernel(TableView table, const int64_t* __restrict__ handles, const int32_t* __restrict__ inverse, int64_t count,
                int64_t width, const float* __restrict__ numbers, const int64_t* __restrict__ headers, uint32_t version,
                uint32_t step) {
  for (int64_t i = GlobalThread(); i < count * width; i += static_cast<int64_t>(gridDim.x) * kThreads) {
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

}  // namespace device_table
}  // namespace fusedrec
