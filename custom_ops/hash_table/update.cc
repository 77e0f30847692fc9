// The update: gradients summed over their sources, the optimizer applied in place, by handle.
#include <algorithm>
#include <vector>

#include "hash_table/gradient_sum.h"
#include "hash_table/hash_table.h"

namespace fusedrec {
namespace {

constexpr int kAhead = 8;  // rows between the fetch of a row and its update

}  // namespace

void HashTable::UpdateRow(const Prepared& prepared, uint32_t handle, float* grad, uint32_t version, float* numbers) {
  char* row = RowOf(handle);
  const RowFormat& row_format = format(PoolOf(handle));
  RowFormat::Header(row)->updated = version;
  const int dim = spec_.dim;
  if (row_format.storage() == Storage::kFloat32) {
    optimizer_.Update(prepared, dim, grad, row_format.Row(row), row_format.Wide(row), row_format.Scalars(row));
    return;
  }
  row_format.Load(row, numbers);
  optimizer_.Update(prepared, dim, grad, numbers, numbers + dim, numbers + dim * (1 + row_format.wide_slots()));
  row_format.Store(numbers, version, row);
}

// Asks for all of a row, to be written.
inline void HashTable::FetchForUpdate(uint32_t handle) const {
  const char* row = RowOf(handle);
  const int bytes = format(PoolOf(handle)).stride();
  for (int offset = 0; offset < bytes; offset += 64) __builtin_prefetch(row + offset, 1);
}

void HashTable::Apply(absl::Span<const int64_t> handles, absl::Span<const int32_t> inverse, const void* grads,
                      Storage storage, float scale, const StepInput& step, const ParallelFor& parallel_for,
                      uint32_t clock) {
  const uint32_t version = BeginUpdate(clock);
  const Prepared prepared = optimizer_.Prepare(step);
  const GradientSum sums(inverse, handles.size(), grads, storage, spec_.dim, scale);
  const int64_t rows = handles.size();
  parallel_for(rows, 100 + 4 * format(0).numbers(), [&](int64_t begin, int64_t end) {
    std::vector<float> grad(spec_.dim), numbers(format(0).numbers());
    for (int64_t i = begin; i < std::min(end, begin + kAhead); ++i) {
      if (handles[i] >= 0) FetchForUpdate(static_cast<uint32_t>(handles[i]));
      sums.Prefetch(i);
    }
    for (int64_t i = begin; i < end; ++i) {
      if (const int64_t next = i + kAhead; next < end) {
        if (handles[next] >= 0) FetchForUpdate(static_cast<uint32_t>(handles[next]));
        sums.Prefetch(next);
      }
      if (handles[i] < 0) continue;  // refused by admission: there is nothing to train yet
      sums.Sum(i, grad.data());
      UpdateRow(prepared, static_cast<uint32_t>(handles[i]), grad.data(), version, numbers.data());
    }
  });
}

absl::Status HashTable::Accumulate(absl::Span<const int64_t> handles, absl::Span<const int32_t> inverse,
                                   const void* grads, Storage storage, float scale, const ParallelFor& parallel_for,
                                   uint32_t clock) {
  std::lock_guard<std::mutex> lock(accumulator_mutex_);
  const uint32_t since = waiting_since_.load(std::memory_order_relaxed);
  if (since == 0 || clock < since) waiting_since_.store(clock, std::memory_order_release);
  std::vector<int64_t> numbers;
  const absl::Status numbered = accumulator_.Number(handles, &numbers);
  if (!numbered.ok()) return numbered;
  const GradientSum sums(inverse, handles.size(), grads, storage, spec_.dim, scale);
  parallel_for(handles.size(), 50 + spec_.dim, [&](int64_t begin, int64_t end) {
    std::vector<float> grad(spec_.dim);
    for (int64_t i = begin; i < end; ++i) {
      if (numbers[i] < 0) continue;
      sums.Sum(i, grad.data());
      float* sum = accumulator_.Sum(numbers[i]);
      for (int d = 0; d < spec_.dim; ++d) sum[d] += grad[d];
    }
  });
  return absl::OkStatus();
}

void HashTable::ApplyAccumulated(const StepInput& step, const ParallelFor& parallel_for) {
  std::lock_guard<std::mutex> lock(accumulator_mutex_);
  const uint32_t version = BeginUpdate(waiting_since_.load());
  const Prepared prepared = optimizer_.Prepare(step);
  const std::vector<uint32_t>& handles = accumulator_.handles();
  parallel_for(handles.size(), 100 + 4 * format(0).numbers(), [&](int64_t begin, int64_t end) {
    std::vector<float> numbers(format(0).numbers());
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) FetchForUpdate(handles[i + kAhead]);
      UpdateRow(prepared, handles[i], accumulator_.Sum(i), version, numbers.data());
    }
  });
  accumulator_.Clear();
  waiting_since_.store(0, std::memory_order_release);
  settled_.store(clock_.load(), std::memory_order_relaxed);
}

}  // namespace fusedrec
