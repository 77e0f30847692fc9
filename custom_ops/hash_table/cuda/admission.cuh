// Kernels of the admission filter: how often ids without a row have come (admission_filter.h).
//
// A segment has a second set of lines (lines.cuh), with the count of a key in the place of its row. A lookup reads the
// counts before it changes anything, because the number of admitted ids decides on the memory that it needs. Each distinct
// id changes its own count, so no threads contend.
#pragma once

#include "hash_table/cuda/message.cuh"
#include "hash_table/cuda/rows.cuh"

namespace fusedrec {
namespace device_table {

// verdict[n] for the first position of each id without a row; where [n], slots: of ProbeKernel. refused_of, uncounted_of
// [segments] count the ids that get no row, and those among them that come for the first time. A segment without admission
// admits every id, and counts none.
static __global__ void __launch_bounds__(kThreads)
    AdmitKernel(TableView table, MessageView message, const Counts* counts,
                const uint32_t* __restrict__ slots, const uint32_t* __restrict__ where, uint8_t* __restrict__ verdict,
                unsigned long long* __restrict__ refused_of, unsigned long long* __restrict__ uncounted_of) {
  if (counts->bad != 0) return;
  int64_t low, high;
  message.Bounds(&low, &high);
  const int64_t n = GlobalThread();
  const uint32_t at = n < message.num_ids ? where[n] : 0;
  const bool asks = (at & kNew) != 0 && slots[at & ~kNew] == n;
  const int64_t run = asks ? message.RunOf(low, high, n) : 0, segment = run % message.segments;
  const int64_t id = asks ? message.Id(n, run) : 0;
  const int64_t threshold = asks ? table.limits[segment].admission_count : 1;
  const uint32_t count = FindRow(threshold > 1 ? table.candidates + segment : nullptr, id, TableHash(id));
  if (!asks) return;
  const bool counted = count != kNowhere, admitted = threshold <= 1 || (counted && count + int64_t{1} >= threshold);
  verdict[n] = admitted ? kAdmitted : counted ? kCounted : kUncounted;
  if (admitted) return;
  atomicAdd(&refused_of[segment], 1ull);
  if (!counted) atomicAdd(&uncounted_of[segment], 1ull);
}

// The counts of this lookup's ids that were counted before; an admitted id has none any more.
static __global__ void __launch_bounds__(kThreads)
    CountKernel(TableView table, MessageView message, const uint32_t* __restrict__ where,
                const uint32_t* __restrict__ first, const uint8_t* __restrict__ verdict) {
  const int64_t n = GlobalThread();
  if (n >= message.num_ids || first[n] != n || (where[n] & kNew) == 0 || verdict[n] == kUncounted) return;
  const int64_t run = message.RunOf(0, message.runs - 1, n), id = message.Id(n, run);
  const int64_t segment = run % message.segments;
  if (table.limits[segment].admission_count <= 1) return;
  const SegmentLines& lines = table.candidates[segment];
  WithKey(lines.lines, lines.mask, id, TableHash(id), [&](Line* line, int place) {
    if (verdict[n] == kAdmitted) {
      atomicAnd(&line->meta, ~(1u << place));
    } else {
      ++line->row[place];
    }
  });
}

// Begins to count the ids that came for the first time.
static __global__ void __launch_bounds__(kThreads)
    BeginToCountKernel(TableView table, MessageView message, const uint32_t* __restrict__ where,
                       const uint32_t* __restrict__ first, const uint8_t* __restrict__ verdict) {
  const int64_t n = GlobalThread();
  if (n >= message.num_ids || first[n] != n || where[n] != kNowhere || verdict[n] != kUncounted) return;
  const int64_t run = message.RunOf(0, message.runs - 1, n), id = message.Id(n, run);
  const SegmentLines& lines = table.candidates[run % message.segments];
  InsertKey(lines.lines, lines.mask, id, TableHash(id), 1);
}

// Halves the counts of a segment, a thread for a place of its lines. *forgotten: ids that came once.
static __global__ void __launch_bounds__(kThreads)
    HalveKernel(SegmentLines lines, unsigned long long* forgotten) {
  const int64_t i = GlobalThread();
  if (i >= static_cast<int64_t>(lines.mask + 1) * kKeysPerLine) return;
  Line* const line = lines.lines + i / kKeysPerLine;
  const int place = static_cast<int>(i % kKeysPerLine);
  if ((LoadFresh(&line->meta) >> place & 1) == 0) return;
  line->row[place] /= 2;
  if (line->row[place] != 0) return;
  atomicAnd(&line->meta, ~(1u << place));
  atomicAdd(forgotten, 1ull);
}

// All ids of a segment and their counts, in any order; *num: how many.
static __global__ void __launch_bounds__(kThreads)
    ListCountsKernel(SegmentLines lines, int64_t* __restrict__ ids, int64_t* __restrict__ counts,
                     unsigned long long* num) {
  const int64_t i = GlobalThread();
  if (i >= static_cast<int64_t>(lines.mask + 1) * kKeysPerLine) return;
  const Line& line = lines.lines[i / kKeysPerLine];
  const int place = static_cast<int>(i % kKeysPerLine);
  if ((line.meta >> place & 1) == 0) return;
  const unsigned long long at = atomicAdd(num, 1ull);
  ids[at] = line.key[place];
  counts[at] = line.row[place];
}

// Counts of distinct ids: of those that are counted (`counted`), or of the others, which `found` [num_ids] tells apart.
static __global__ void __launch_bounds__(kThreads)
    SetCountsKernel(SegmentLines lines, const int64_t* __restrict__ ids, const uint32_t* __restrict__ numbers,
                    const uint32_t* __restrict__ found, int64_t num_ids, bool counted) {
  const int64_t n = GlobalThread();
  if (n >= num_ids || (found[n] != kNowhere) != counted) return;
  const uint64_t hash = TableHash(ids[n]);
  if (!counted) return InsertKey(lines.lines, lines.mask, ids[n], hash, numbers[n]);
  WithKey(lines.lines, lines.mask, ids[n], hash, [&](Line* line, int place) { line->row[place] = numbers[n]; });
}

}  // namespace device_table
}  // namespace fusedrec
