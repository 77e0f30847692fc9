// Updates, and the gradients that wait for one; update.cuh and sums.cuh say how.
#include <algorithm>
#include <utility>

#include "hash_table/cuda/table_memory.h"
#include "hash_table/cuda/update/handles.cuh"
#include "hash_table/cuda/update/sums.cuh"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

namespace {

// Scratch of an update: the gradients of each handle, in the order received.
struct UpdateScratch {
  explicit UpdateScratch(const FusedrecAllocator& from) : memory(&from) {}

  int Take(int64_t num_ids, int64_t num_rows) {
    FUSEDREC_RETURN_IF_CUDA_ERROR(memory.Take({{&begin, num_rows + 1}, {&count, 1}}));
    return sort.Take(num_ids, &memory);
  }

  // Sorts the positions of `inverse` by handle, and writes where the positions of each handle begin.
  int Sort(const int32_t* inverse, int64_t num_ids, int64_t num_rows, const int32_t** order, void* stream) const {
    Sorted sorted;
    FUSEDREC_RETURN_IF_CUDA_ERROR(sort.ByRow(inverse, num_rows, &sorted, stream));
    FUSEDREC_LAUNCH(BeginsKernel, BlocksFor(num_ids + 1, kUpdateThreads), kUpdateThreads, 0, stream, sorted.keys, num_ids,
                    num_rows, begin);
    *order = sorted.positions;
    return kCudaSuccess;
  }

  ScratchMemory memory;
  PositionSort sort;
  int32_t* begin = nullptr;   // [num_rows + 1]
  unsigned* count = nullptr;  // of the rows that are left out
};

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

int fusedrec_table_apply(FusedrecDeviceTable* table, const int64_t* handles, int64_t num_rows, const int32_t* inverse,
                         int64_t num_ids, const void* grads, int64_t storage, float scale, const Step* step,
                         int32_t* left_out, int64_t* num_left_out, void* stream) {
  *num_left_out = 0;
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (storage < 0 || storage > 2 || num_rows < 0 || num_rows > kDeviceTableMaxIds || num_ids < 0 ||
      num_ids > kDeviceTableMaxIds || step->number < 1) {
    return kCudaInvalidValue;
  }
  if (num_rows == 0) {
    if (num_ids > 0) return kDeviceBadInverse;
    ++table->version_;
    return kCudaSuccess;
  }
  UpdateScratch at(table->allocator_);
  FUSEDREC_RETURN_IF_CUDA_ERROR(at.Take(num_ids, num_rows));
  HandleFacts facts;
  const Numbers numbers{grads, static_cast<Storage>(storage), num_ids * table->layout_.dim};
  FUSEDREC_RETURN_IF_CUDA_ERROR(table->CheckHandles(handles, num_rows, inverse, num_ids, numbers, nullptr, ++table->attempt_,
                                                    &facts, stream));
  if (int64_t{facts.oldest} + table->options_.window <= table->moved_at_) return kDeviceStale;
  ++table->version_;
  if (num_ids == 0) return kCudaSuccess;
  const int32_t* order;
  FUSEDREC_RETURN_IF_CUDA_ERROR(at.Sort(inverse, num_ids, num_rows, &order, stream));
  const GradientColumns columns{grads, static_cast<Storage>(storage), order, 0, 0, table->layout_.dim, scale, 1.0f};
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(at.count, 0, sizeof(*at.count), stream));
  table->Train(handles, num_rows, at.begin, columns, *step, left_out, at.count, stream);
  if (facts.grads_are_finite != 0) return LastError();
  unsigned counted;
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(&counted, at.count, 1, stream));
  *num_left_out = counted;
  return LastError();
}

void FusedrecDeviceTable::Train(const int64_t* handles, int64_t num_rows, const int32_t* begin,
                                const GradientColumns& grads, const Step& step, int32_t* left_out, unsigned* num_left_out,
                                void* stream) const {
  const uint32_t version = version_;
  std::visit(
      [&](const auto& rule) {
        using R = std::decay_t<decltype(rule)>;
        FUSEDREC_LAUNCH(UpdateKernel<R>, BlocksFor(num_rows * kRowLanes, kUpdateThreads), kUpdateThreads, 0, stream, View(),
                        handles, num_rows, begin, grads, rule, rule.Prepare(step), R::LeavesRows(step), version, left_out,
                        num_left_out);
      },
      rule_);
}

int FusedrecDeviceTable::CheckHandles(const int64_t* handles, int64_t num_handles, const int32_t* inverse,
                                      int64_t num_ids, const Numbers& grads, const uint32_t* sum_of_row,
                                      uint32_t attempt, HandleFacts* known, void* stream) const {
  const Memory memory(allocator_, sizeof(HandleFacts));
  if (memory.data() == nullptr) return kDeviceOutOfMemory;
  auto* const facts = reinterpret_cast<HandleFacts*>(memory.data());
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(facts, 0xff, sizeof(HandleFacts), stream));
  const int64_t most = std::max({num_handles, num_ids, grads.count});
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(BlocksFor(most, kHandleThreads), kHandleBlocks));
  FUSEDREC_LAUNCH(HandleFactsKernel, blocks, kHandleThreads, 0, stream, View(), handles, num_handles, inverse, num_ids,
                  rows_.next, grads, sum_of_row, attempt, facts);
  FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(known, facts, 1, stream));
  if (known->handles_are_sound == 0) return kDeviceBadHandle;
  const bool names_rows = known->oldest != ~0u;
  // All handles must be of one past lookup. Handles of an export have no clock and cannot be trained.
  if (inverse != nullptr && names_rows && (known->oldest != ~known->newest || known->oldest == 0 || known->oldest > clock_)) {
    return kDeviceBadHandle;
  }
  if (known->handles_are_distinct == 0) return kDeviceDoubled;
  return known->inverse_is_sound == 0 ? kDeviceBadInverse : kCudaSuccess;
}

int fusedrec_table_accumulate(FusedrecDeviceTable* table, const int64_t* handles, int64_t num_rows, const int32_t* inverse,
                              int64_t num_ids, const void* grads, int64_t storage, float scale, int begin, int32_t* left_out,
                              int64_t* num_left_out, void* stream) {
  *num_left_out = 0;
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (storage < 0 || storage > 2 || num_rows < 0 || num_rows > kDeviceTableMaxIds || num_ids < 0 ||
      num_ids > kDeviceTableMaxIds) {
    return kCudaInvalidValue;
  }
  if (num_rows == 0) {
    if (num_ids > 0) return kDeviceBadInverse;
    return begin ? table->DropSums(stream) : kCudaSuccess;
  }
  UpdateScratch at(table->allocator_);
  FUSEDREC_RETURN_IF_CUDA_ERROR(at.Take(num_ids, num_rows));
  HandleFacts facts;
  const Numbers numbers{grads, static_cast<Storage>(storage), num_ids * table->layout_.dim};
  const bool rows_are_numbered = !begin && table->waiting_.count > 0 && table->SumsCoverRows();
  const uint32_t* const known = rows_are_numbered ? ViewOf(table->waiting_.sum_of_row, {}, {}).sum_of_row : nullptr;
  FUSEDREC_RETURN_IF_CUDA_ERROR(table->CheckHandles(handles, num_rows, inverse, num_ids, numbers, known, ++table->attempt_,
                                                    &facts, stream));
  if (int64_t{facts.oldest} + table->options_.window <= table->moved_at_) return kDeviceStale;
  // All memory, before anything changes.
  const int64_t kept = begin ? 0 : table->waiting_.count, more = facts.all_have_sums == 0 ? num_rows : 0;
  FusedrecDeviceTable::Waiting grown;
  FUSEDREC_RETURN_IF_CUDA_ERROR(table->AllocateSums(kept, more, &grown));
  if (begin) FUSEDREC_RETURN_IF_CUDA_ERROR(table->DropSums(stream));
  if (more > 0) FUSEDREC_RETURN_IF_CUDA_ERROR(table->GrowSums(std::move(grown), handles, more, stream));
  const bool names_rows = facts.oldest != ~0u;
  if (names_rows && (table->waiting_.since == 0 || facts.oldest < table->waiting_.since)) table->waiting_.since = facts.oldest;

  // No id: every handle is of another part of the lookup.
  if (num_ids == 0) return LastError();
  const int32_t* order;
  FUSEDREC_RETURN_IF_CUDA_ERROR(at.Sort(inverse, num_ids, num_rows, &order, stream));
  const GradientColumns columns{grads, static_cast<Storage>(storage), order, 0, 0, table->layout_.dim, scale, 1.0f};
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(at.count, 0, sizeof(*at.count), stream));
  const SumsView view = ViewOf(table->waiting_.sum_of_row, table->waiting_.rows, table->waiting_.sums);
  FUSEDREC_LAUNCH(AddToSumsKernel, BlocksFor(num_rows * kRowLanes, kUpdateThreads), kUpdateThreads, 0, stream, view,
                  handles, num_rows, at.begin, columns, left_out, at.count);
  if (facts.grads_are_finite != 0) return LastError();
  unsigned counted;
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(&counted, at.count, 1, stream));
  *num_left_out = counted;
  return LastError();
}

int fusedrec_table_apply_accumulated(FusedrecDeviceTable* table, const Step* step, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (step->number < 1) return kCudaInvalidValue;
  ++table->version_;
  if (table->waiting_.count > 0) {
    const SumsView view = ViewOf(table->waiting_.sum_of_row, table->waiting_.rows, table->waiting_.sums);
    const GradientColumns columns{view.sums, Storage::kFloat32, nullptr, 0, 0, table->layout_.dim, 1.0f, 1.0f};
    table->Train(view.rows, table->waiting_.count, nullptr, columns, *step, nullptr, nullptr, stream);
  }
  return table->DropSums(stream);
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
