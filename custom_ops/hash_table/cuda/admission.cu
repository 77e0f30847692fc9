// Admission: counts of ids without a row. admission.cuh says how.
#include "hash_table/cuda/admission.cuh"

#include <algorithm>
#include <map>
#include <utility>

#include "common/hash.h"
#include "hash_table/cuda/table.h"

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

int FusedrecDeviceTable::Candidates(int64_t segment, const FusedrecIdSink& sink, void* stream) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (segment < 0 || segment >= segments()) return kCudaInvalidValue;
  const int64_t size = segments_[segment].candidates.size;
  std::vector<int64_t> ids(size), counts(size);
  if (size > 0) {
    int64_t *listed = nullptr, *numbers = nullptr;
    unsigned long long* num = nullptr;
    const auto carve = [&](void* memory) {
      Carver carver(memory);
      listed = carver.Take<int64_t>(size);
      numbers = carver.Take<int64_t>(size);
      num = carver.Take<unsigned long long>(1);
      return carver.bytes();
    };
    const Memory memory(allocator_, carve(nullptr));
    if (memory.data() == nullptr) return kDeviceOutOfMemory;
    carve(memory.data());
    const SegmentLines lines = LinesOf(segments_[segment].candidates);
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
  sink.take(sink.context, sorted_ids.data(), sorted_counts.data(), size);
  return kCudaSuccess;
}

int FusedrecDeviceTable::SetCandidates(int64_t segment, const int64_t* ids, const int64_t* counts, int64_t count,
                                       void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (segment < 0 || segment >= segments() || count < 0 || count > kDeviceTableMaxIds) return kCudaInvalidValue;
  if (limits_[segment].admission_count <= 1) return kCudaSuccess;
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
  KeyLines& counted = segments_[segment].candidates;
  FUSEDREC_RETURN_IF_CUDA_ERROR(FindRows(ViewsOfCandidates() + segment, wanted, &found, stream));
  const int64_t absent = std::count(found.begin(), found.end(), kNowhere);
  Growth growth;
  FUSEDREC_RETURN_IF_CUDA_ERROR(AllocateLines(&counted, absent, &growth));
  Carver carver(nullptr);
  carver.Take<int64_t>(n);
  carver.Take<uint32_t>(2 * n);
  const Memory memory(allocator_, carver.bytes());
  if (memory.data() == nullptr) return kDeviceOutOfMemory;
  Carver at(memory.data());
  int64_t* const device_ids = at.Take<int64_t>(n);
  uint32_t* const device_numbers = at.Take<uint32_t>(2 * n);
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(device_ids, wanted.data(), n, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(device_numbers, numbers.data(), n, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(device_numbers + n, found.data(), n, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Grow(std::move(growth), stream));
  counted.size += absent;
  for (const bool known : {true, false}) {
    FUSEDREC_LAUNCH(SetCountsKernel, BlocksFor(n, kThreads), kThreads, 0, stream, LinesOf(counted), device_ids,
                    device_numbers, device_numbers + n, n, known);
  }
  return LastError();
}
