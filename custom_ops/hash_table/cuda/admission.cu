// Admission: counts of ids without a row. admission.cuh says how.
#include "hash_table/cuda/admission.cuh"

#include <algorithm>
#include <map>
#include <utility>

#include "common/hash.h"
#include "hash_table/cuda/table_memory.h"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

namespace {

int64_t PlacesOf(const SegmentLines& lines) { return static_cast<int64_t>(lines.mask + 1) * kKeysPerLine; }

}  // namespace

void FusedrecDeviceTable::Judge(const Received& received, const uint32_t* slots, const uint32_t* where,
                                uint8_t* verdict, void* stream) const {
  const MessageView& view = received.view;
  FUSEDREC_LAUNCH(AdmitKernel, BlocksFor(view.num_ids, kThreads), kThreads, 0, stream, View(), view,
                  received.counts, slots, where, verdict, received.refused_of,
                  received.uncounted_of);
}

void FusedrecDeviceTable::CountRefused(const MessageView& view, const uint32_t* where, const uint32_t* first,
                                       const uint8_t* verdict, void* stream) const {
  FUSEDREC_LAUNCH(CountKernel, BlocksFor(view.num_ids, kThreads), kThreads, 0, stream, View(), view, where, first,
                  verdict);
  FUSEDREC_LAUNCH(BeginToCountKernel, BlocksFor(view.num_ids, kThreads), kThreads, 0, stream, View(), view, where, first,
                  verdict);
}

int FusedrecDeviceTable::HalveCandidates(unsigned long long* forgotten, void* stream) {
  for (int64_t s = 0; s < segments(); ++s) {
    KeyLines& counted = segments_[s].candidates;
    const int64_t most = limits_[s].max_candidates;
    while (most > 0 && counted.size > most) {
      const SegmentLines lines = LinesOf(counted);
      FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(forgotten, 0, sizeof(*forgotten), stream));
      FUSEDREC_LAUNCH(HalveKernel, BlocksFor(PlacesOf(lines), kThreads), kThreads, 0, stream, lines, forgotten);
      FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
      unsigned long long gone;
      FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(&gone, forgotten, 1, stream));
      counted.size -= static_cast<int64_t>(gone);
      counted.removed += static_cast<int64_t>(gone);
    }
  }
  return kCudaSuccess;
}

int fusedrec_table_candidates(FusedrecDeviceTable* table, int64_t segment, const FusedrecIdSink* sink, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (segment < 0 || segment >= table->segments()) return kCudaInvalidValue;
  const int64_t size = table->segments_[segment].candidates.size;
  std::vector<int64_t> ids(size), counts(size);
  if (size > 0) {
    int64_t *listed, *numbers;
    unsigned long long* num;
    ScratchMemory memory(&table->allocator_);
    FUSEDREC_RETURN_IF_CUDA_ERROR(memory.Take({{&listed, size}, {&numbers, size}, {&num, 1}}));
    const SegmentLines lines = table->LinesOf(table->segments_[segment].candidates);
    FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(num, 0, sizeof(*num), stream));
    FUSEDREC_LAUNCH(ListCountsKernel, BlocksFor(PlacesOf(lines), kThreads), kThreads, 0, stream, lines, listed, numbers,
                    num);
    FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(ids.data(), listed, size, stream));
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(counts.data(), numbers, size, stream));
  }
  // The order of checkpoints (contents.cc).
  std::vector<std::pair<uint64_t, int64_t>> order(size);
  for (int64_t i = 0; i < size; ++i) order[i] = {Mix64(static_cast<uint64_t>(ids[i])), i};
  std::sort(order.begin(), order.end());
  std::vector<int64_t> sorted_ids(size), sorted_counts(size);
  for (int64_t i = 0; i < size; ++i) {
    sorted_ids[i] = ids[order[i].second];
    sorted_counts[i] = counts[order[i].second];
  }
  sink->take(sink->context, sorted_ids.data(), sorted_counts.data(), size);
  return kCudaSuccess;
}

int fusedrec_table_set_candidates(FusedrecDeviceTable* table, int64_t segment, const int64_t* ids, const int64_t* counts,
                                  int64_t count, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (segment < 0 || segment >= table->segments() || count < 0 || count > kDeviceTableMaxIds) return kCudaInvalidValue;
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
  FUSEDREC_RETURN_IF_CUDA_ERROR(table->FindRows(table->ViewsOfCandidates() + segment, wanted, &found, stream));
  const int64_t absent = std::count(found.begin(), found.end(), kNowhere);
  FusedrecDeviceTable::Growth growth;
  FUSEDREC_RETURN_IF_CUDA_ERROR(table->AllocateLines(&counted, absent, &growth));
  ScratchMemory memory(&table->allocator_);
  int64_t* device_ids;
  uint32_t* device_numbers;
  FUSEDREC_RETURN_IF_CUDA_ERROR(memory.Take({{&device_ids, n}, {&device_numbers, 2 * n}}));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(device_ids, wanted.data(), n, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(device_numbers, numbers.data(), n, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(device_numbers + n, found.data(), n, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(table->Grow(std::move(growth), stream));
  counted.size += absent;
  for (const bool known : {true, false}) {
    FUSEDREC_LAUNCH(SetCountsKernel, BlocksFor(n, kThreads), kThreads, 0, stream, table->LinesOf(counted), device_ids,
                    device_numbers, device_numbers + n, n, known);
  }
  return LastError();
}
