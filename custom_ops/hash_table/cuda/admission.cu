// Admission: counts of ids without a row (admission_filter.h).
//
// A segment has a second set of lines (lines.cuh), with the count of a key in the place of its row. A lookup reads the
// counts before it changes anything, because the number of admitted ids decides on the memory that it needs. Each distinct
// id changes its own count, so no threads contend.

#include <tuple>

#include "common/hash.h"
#include "hash_table/cuda/table_memory.h"

namespace {

// verdict[n] for the first position of each id without a row; where [n], slots: of ProbeKernel. refused_of, uncounted_of
// [segments] count the ids that get no row, and those among them that come for the first time. A segment without admission
// admits every id, and counts none.
FUSEDREC_KERNEL AdmitKernel(TableView table, MessageView message, const Counts* counts,
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
FUSEDREC_KERNEL CountKernel(TableView table, MessageView message, const uint32_t* __restrict__ where,
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

FUSEDREC_KERNEL BeginToCountKernel(TableView table, MessageView message, const uint32_t* __restrict__ where,
                                   const uint32_t* __restrict__ first, const uint8_t* __restrict__ verdict) {
  const int64_t n = GlobalThread();
  if (n >= message.num_ids || first[n] != n || where[n] != kNowhere || verdict[n] != kUncounted) return;
  const int64_t run = message.RunOf(0, message.runs - 1, n), id = message.Id(n, run);
  const SegmentLines& lines = table.candidates[run % message.segments];
  InsertKey(lines.lines, lines.mask, id, TableHash(id), 1);
}

// Halves the counts of a segment, a thread for a place of its lines. *forgotten: ids that came once.
FUSEDREC_KERNEL HalveKernel(SegmentLines lines, unsigned long long* forgotten) {
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
FUSEDREC_KERNEL ListCountsKernel(SegmentLines lines, int64_t* __restrict__ ids, int64_t* __restrict__ counts,
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
FUSEDREC_KERNEL SetCountsKernel(SegmentLines lines, const int64_t* __restrict__ ids,
    const uint32_t* __restrict__ numbers, const uint32_t* __restrict__ found, int64_t num_ids, bool counted) {
  const int64_t n = GlobalThread();
  if (n >= num_ids || (found[n] != kNowhere) != counted) return;
  const uint64_t hash = TableHash(ids[n]);
  if (!counted) return InsertKey(lines.lines, lines.mask, ids[n], hash, numbers[n]);
  WithKey(lines.lines, lines.mask, ids[n], hash, [&](Line* line, int place) { line->row[place] = numbers[n]; });
}

int64_t PlacesOf(const SegmentLines& lines) { return static_cast<int64_t>(lines.mask + 1) * kKeysPerLine; }

}  // namespace

void FusedrecDeviceTable::Judge(const Received& received, const AdmitScratch& at, void* stream) const {
  FUSEDREC_FOR_EACH(AdmitKernel, received.view.num_ids, stream, View(), received.view, received.counts, at.slots, at.where,
                    at.verdict, received.refused_of, received.uncounted_of);
}

void FusedrecDeviceTable::CountRefused(const MessageView& view, const AdmitScratch& at, void* stream) const {
  FUSEDREC_FOR_EACH(CountKernel, view.num_ids, stream, View(), view, at.where, at.first, at.verdict);
  FUSEDREC_FOR_EACH(BeginToCountKernel, view.num_ids, stream, View(), view, at.where, at.first, at.verdict);
}

int FusedrecDeviceTable::HalveCandidates(unsigned long long* forgotten, void* stream) {
  for (int64_t s = 0; s < segments(); ++s) {
    KeyLines& counted = segments_[s].candidates;
    const int64_t most = limits_[s].max_candidates;
    while (most > 0 && counted.size > most) {
      const SegmentLines lines = counted.view();
      FUSEDREC_TRY(Fill(forgotten, 0, sizeof(*forgotten), stream));
      FUSEDREC_FOR_EACH(HalveKernel, PlacesOf(lines), stream, lines, forgotten);
      FUSEDREC_TRY(LastError());
      unsigned long long gone;
      FUSEDREC_TRY(CopyToHost(&gone, forgotten, 1, stream));
      counted.size -= static_cast<int64_t>(gone);
      counted.removed += static_cast<int64_t>(gone);
    }
  }
  return kCudaSuccess;
}

int fusedrec_table_candidates(FusedrecDeviceTable* table, int64_t segment, const FusedrecIdSink* sink, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  const int64_t size = table->segments_[segment].candidates.size;
  std::vector<int64_t> ids(size), counts(size);
  if (size > 0) {
    int64_t *listed, *numbers;
    unsigned long long* num;
    ScratchMemory memory(&table->allocator_);
    FUSEDREC_TRY(memory.Take({{&listed, size}, {&numbers, size}, {&num, 1}}));
    const SegmentLines lines = table->segments_[segment].candidates.view();
    FUSEDREC_TRY(Fill(num, 0, sizeof(*num), stream));
    FUSEDREC_FOR_EACH(ListCountsKernel, PlacesOf(lines), stream, lines, listed, numbers, num);
    FUSEDREC_TRY(LastError());
    FUSEDREC_TRY(CopyToHost(ids.data(), listed, size, stream));
    FUSEDREC_TRY(CopyToHost(counts.data(), numbers, size, stream));
  }
  // The order of checkpoints (HashTable::Candidates).
  std::vector<std::tuple<uint64_t, int64_t, int64_t>> order(size);
  for (int64_t i = 0; i < size; ++i) order[i] = {Mix64(static_cast<uint64_t>(ids[i])), ids[i], counts[i]};
  std::sort(order.begin(), order.end());
  for (int64_t i = 0; i < size; ++i) std::tie(std::ignore, ids[i], counts[i]) = order[i];
  sink->take(sink->context, ids.data(), counts.data(), size);
  return kCudaSuccess;
}

int fusedrec_table_set_candidates(FusedrecDeviceTable* table, int64_t segment, const int64_t* ids, const int64_t* counts,
                                  int64_t count, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (count > kDeviceTableMaxIds) return kCudaInvalidValue;
  if (table->limits_[segment].admission_count <= 1) return kCudaSuccess;
  std::map<int64_t, uint32_t> distinct;  // the last count of an id stays
  for (int64_t i = 0; i < count; ++i) distinct[ids[i]] = static_cast<uint32_t>(counts[i]);
  std::vector<int64_t> wanted;
  std::vector<uint32_t> numbers, found;
  for (const auto& [id, number] : distinct) {
    wanted.push_back(id);
    numbers.push_back(number);
  }
  const int64_t n = wanted.size();
  if (n == 0) return kCudaSuccess;
  FusedrecDeviceTable::KeyLines& counted = table->segments_[segment].candidates;
  FUSEDREC_TRY(table->FindRows(table->ViewsOfCandidates() + segment, wanted, &found, stream));
  const int64_t absent = std::count(found.begin(), found.end(), kNowhere);
  FusedrecDeviceTable::Growth growth;
  FUSEDREC_TRY(table->AllocateLines(&counted, absent, &growth));
  ScratchMemory memory(&table->allocator_);
  int64_t* device_ids;
  uint32_t* device_numbers;
  FUSEDREC_TRY(memory.Take({{&device_ids, n}, {&device_numbers, 2 * n}}));
  FUSEDREC_TRY(CopyToDevice(device_ids, wanted.data(), n, stream));
  FUSEDREC_TRY(CopyToDevice(device_numbers, numbers.data(), n, stream));
  FUSEDREC_TRY(CopyToDevice(device_numbers + n, found.data(), n, stream));
  FUSEDREC_TRY(table->Grow(std::move(growth), stream));
  counted.size += absent;
  for (const bool known : {true, false}) {
    FUSEDREC_FOR_EACH(SetCountsKernel, n, stream, counted.view(), device_ids, device_numbers,
                      device_numbers + n, n, known);
  }
  return LastError();
}
