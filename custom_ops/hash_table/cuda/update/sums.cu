// Gradients that wait for their update; sums.cuh says how.
#include "hash_table/cuda/update/sums.cuh"

#include <utility>

#include "hash_table/cuda/table.h"
#include "hash_table/cuda/update/update_scratch.h"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

namespace {

SumsView ViewOf(const Memory& sum_of_row, const Memory& rows, const Memory& sums) {
  return {reinterpret_cast<uint32_t*>(sum_of_row.data()), reinterpret_cast<int64_t*>(rows.data()),
          reinterpret_cast<float*>(sums.data())};
}

// Replaces `old`, of whose bytes the first `kept` stay; the others get this byte.
int Replace(Memory larger, int64_t kept, int byte, Memory* old, void* stream) {
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(larger.data() + kept, byte, larger.bytes() - kept, stream));
  if (kept > 0) {
    FUSEDREC_RETURN_IF_CUDA_ERROR(static_cast<int>(cudaMemcpyAsync(
        larger.data(), old->data(), kept, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream))));
  }
  *old = std::move(larger);
  return kCudaSuccess;
}

}  // namespace

int FusedrecDeviceTable::Accumulate(const int64_t* handles, int64_t num_rows, const int32_t* inverse, int64_t num_ids,
                                    const void* grads, int64_t storage, float scale, bool begin, int32_t* left_out,
                                    int64_t* num_left_out, void* stream) {
  *num_left_out = 0;
  std::lock_guard<std::mutex> lock(mutex_);
  if (storage < 0 || storage > 2 || num_rows < 0 || num_rows > kDeviceTableMaxIds || num_ids < 0 ||
      num_ids > kDeviceTableMaxIds) {
    return kCudaInvalidValue;
  }
  if (num_rows == 0) {
    if (num_ids > 0) return kDeviceBadInverse;
    return begin ? DropSums(stream) : kCudaSuccess;
  }
  UpdateScratch at(allocator_);
  FUSEDREC_RETURN_IF_CUDA_ERROR(at.Take(num_ids, num_rows));
  HandleFacts facts;
  const Numbers numbers{grads, static_cast<Storage>(storage), num_ids * layout_.dim};
  const bool rows_are_numbered = !begin && waiting_.count > 0 && SumsCoverRows();
  const uint32_t* const known = rows_are_numbered ? ViewOf(waiting_.sum_of_row, {}, {}).sum_of_row : nullptr;
  FUSEDREC_RETURN_IF_CUDA_ERROR(CheckHandles(handles, num_rows, inverse, num_ids, numbers, known, ++attempt_, &facts, stream));
  if (int64_t{facts.oldest} + options_.window <= moved_at_) return kDeviceStale;
  // All memory, before anything changes.
  const int64_t kept = begin ? 0 : waiting_.count, more = facts.all_have_sums == 0 ? num_rows : 0;
  Waiting grown;
  FUSEDREC_RETURN_IF_CUDA_ERROR(AllocateSums(kept, more, &grown));
  if (begin) FUSEDREC_RETURN_IF_CUDA_ERROR(DropSums(stream));
  if (more > 0) FUSEDREC_RETURN_IF_CUDA_ERROR(GrowSums(std::move(grown), handles, more, stream));
  const bool names_rows = facts.oldest != ~0u;
  if (names_rows && (waiting_.since == 0 || facts.oldest < waiting_.since)) waiting_.since = facts.oldest;

  // No id: every handle is of another part of the lookup.
  if (num_ids == 0) return LastError();
  const int32_t* order;
  FUSEDREC_RETURN_IF_CUDA_ERROR(at.Sort(inverse, num_ids, num_rows, &order, stream));
  const GradientColumns columns{grads, static_cast<Storage>(storage), order, 0, 0, layout_.dim, scale, 1.0f};
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(at.count, 0, sizeof(*at.count), stream));
  const SumsView view = ViewOf(waiting_.sum_of_row, waiting_.rows, waiting_.sums);
  FUSEDREC_LAUNCH(AddToSumsKernel, BlocksFor(num_rows * kRowLanes, kUpdateThreads), kUpdateThreads, 0, stream, view,
                  handles, num_rows, at.begin, columns, left_out, at.count);
  if (facts.grads_are_finite != 0) return LastError();
  unsigned counted;
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(&counted, at.count, 1, stream));
  *num_left_out = counted;
  return LastError();
}

int FusedrecDeviceTable::ApplyAccumulated(const Step& step, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (step.number < 1) return kCudaInvalidValue;
  ++version_;
  if (waiting_.count > 0) {
    const SumsView view = ViewOf(waiting_.sum_of_row, waiting_.rows, waiting_.sums);
    const GradientColumns columns{view.sums, Storage::kFloat32, nullptr, 0, 0, layout_.dim, 1.0f, 1.0f};
    Train(view.rows, waiting_.count, nullptr, columns, step, nullptr, nullptr, stream);
  }
  return DropSums(stream);
}

bool FusedrecDeviceTable::SumsCoverRows() const {
  return waiting_.sum_of_row.bytes() >= rows_.next * static_cast<int64_t>(sizeof(uint32_t));
}

int FusedrecDeviceTable::AllocateSums(int64_t kept, int64_t more, Waiting* grown) const {
  if (more == 0) return kCudaSuccess;
  grown->count = kept + more;
  if (grown->count >= kDeviceTableMaxRows) return kDeviceOutOfMemory;
  const auto allocate = [&](int64_t count, int64_t bytes, Memory* memory) {
    *memory = Memory(allocator_, count * bytes);
    return memory->data() != nullptr;
  };
  const int64_t rows = static_cast<int64_t>(rows_.memory.size()) * chunk_rows();
  const bool has_memory = (SumsCoverRows() || allocate(rows, sizeof(uint32_t), &grown->sum_of_row)) &&
                          allocate(grown->count, sizeof(int64_t), &grown->rows) &&
                          allocate(grown->count, layout_.dim * sizeof(float), &grown->sums);
  return has_memory ? kCudaSuccess : kDeviceOutOfMemory;
}

int FusedrecDeviceTable::GrowSums(Waiting grown, const int64_t* handles, int64_t more, void* stream) {
  const int64_t kept = waiting_.count;
  if (grown.sum_of_row.data() != nullptr) {
    const int64_t known = waiting_.sum_of_row.bytes();
    FUSEDREC_RETURN_IF_CUDA_ERROR(Replace(std::move(grown.sum_of_row), known, 0xff, &waiting_.sum_of_row, stream));
  }
  const int64_t kept_rows = kept * sizeof(int64_t), kept_sums = kept * layout_.dim * sizeof(float);
  FUSEDREC_RETURN_IF_CUDA_ERROR(Replace(std::move(grown.rows), kept_rows, 0, &waiting_.rows, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Replace(std::move(grown.sums), kept_sums, 0, &waiting_.sums, stream));
  waiting_.count = grown.count;
  FUSEDREC_LAUNCH(NumberSumsKernel, BlocksFor(more, kUpdateThreads), kUpdateThreads, 0, stream,
                  ViewOf(waiting_.sum_of_row, waiting_.rows, waiting_.sums), handles, more, kept);
  return LastError();
}

int FusedrecDeviceTable::DropSums(void* stream) {
  if (waiting_.count > 0) {
    FUSEDREC_LAUNCH(ForgetSumsKernel, BlocksFor(waiting_.count, kUpdateThreads), kUpdateThreads, 0, stream,
                    ViewOf(waiting_.sum_of_row, waiting_.rows, waiting_.sums), waiting_.count);
  }
  // The numbers of rows stay: all of them say that there is no sum.
  waiting_.rows = Memory();
  waiting_.sums = Memory();
  waiting_.count = waiting_.since = 0;
  return LastError();
}
