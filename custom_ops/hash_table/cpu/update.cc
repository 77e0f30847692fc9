// The update: gradients summed over their sources, the optimizer applied in place, by handle.

#include "hash_table/cpu/hash_table.h"
#include "hash_table/cpu/parts/gradient_sum.h"

namespace fusedrec {

constexpr int kAhead = 8;  // rows between the fetch of a row and its update

// Threads add numbers, seldom.
static void Add(int64_t number, std::mutex* mutex, std::vector<int32_t>* numbers) {
  std::lock_guard<std::mutex> lock(*mutex);
  numbers->push_back(static_cast<int32_t>(number));
}

uint32_t HashTable::BeginUpdate(uint32_t clock) {
  rows_.change_log().Update(clock);
  return rows_.NextVersion();
}

void HashTable::UpdateRow(const RuleStep& step, uint32_t handle, float* grad, uint32_t version, float* numbers) {
  char* row = rows_.Row(handle);
  const RowFormat& row_format = format(RowStore::PoolOf(handle));
  RowFormat::Header(row)->updated = version;
  const int dim = spec().dim;
  if (row_format.storage() == Storage::kFloat32) {
    step.Train(dim, grad, row_format.Row(row), row_format.Wide(row), row_format.Scalars(row));
    return;
  }
  row_format.Load(row, numbers);
  step.Train(dim, grad, numbers, numbers + dim, numbers + dim * (1 + row_format.wide_slots()));
  row_format.Store(numbers, version, row);
}

absl::Status HashTable::Train(const TableCall& call, const Gradients& in, const std::vector<uint8_t>& waits,
                              const RuleStep* by, std::vector<int32_t>* left_out) {
  absl::Span<const int64_t> handles = in.handles;
  const GradientSum sums(in, spec().dim);
  std::vector<int64_t> of_part, numbers;
  const bool is_whole = by != nullptr && in.begin && in.coming.empty();
  if (!is_whole) {
    of_part.assign(handles.begin(), handles.end());
    for (size_t i = 0; i < of_part.size(); ++i) {
      if (sums.IsEmpty(i)) of_part[i] = kNoRow;
    }
    handles = of_part;
    FUSEDREC_TRY(accumulator_.Number(handles, waits, &numbers));
  }
  std::mutex mutex;
  call.parallel_for(handles.size(), 100 + 4 * format(0).numbers(), [&](int64_t begin, int64_t end) {
    std::vector<float> grad(spec().dim), scratch(format(0).numbers());
    for (int64_t next = begin; next < end + kAhead; ++next) {
      if (next < end && handles[next] >= 0) {
        if (waits[next] == 0) rows_.store().FetchForUpdate(static_cast<uint32_t>(handles[next]));
        sums.Prefetch(next);
      }
      const int64_t i = next - kAhead;
      // Refused by admission, so that there is nothing to train yet, or of another part of the lookup.
      if (i < begin || handles[i] < 0 || sums.IsEmpty(i)) continue;
      sums.Sum(i, grad.data());
      float* sum = grad.data();
      uint8_t listed = 0, *is_listed = &listed;
      if (!is_whole && numbers[i] >= 0) {
        sum = accumulator_.Sum(numbers[i]);
        is_listed = accumulator_.LeftOut(numbers[i]);
        for (int d = 0; d < spec().dim; ++d) sum[d] += grad[d];
      }
      if (!AllFinite(sum, spec().dim)) {
        if (std::exchange(*is_listed, 1) == 0) Add(i, &mutex, left_out);
      } else if (waits[i] == 0) {
        UpdateRow(*by, static_cast<uint32_t>(handles[i]), sum, update_, scratch.data());
      }
    }
  });
  std::sort(left_out->begin(), left_out->end());
  return absl::OkStatus();
}

absl::Status HashTable::Apply(const TableCall& call, const Gradients& in, const Step& step,
                              std::vector<int32_t>* left_out) {
  uint32_t clock;
  FUSEDREC_TRY(CheckGradients(in, &clock));
  std::lock_guard<std::mutex> lock(accumulator_mutex_);
  if (in.begin) update_ = BeginUpdate(clock);
  if (in.begin && !in.coming.empty()) accumulator_.Clear();  // a step that failed may have left sums
  std::vector<uint8_t> waits(in.handles.size(), 0);
  for (const absl::Span<const int32_t> rows : in.coming) {
    for (const int32_t row : rows) waits[row] = 1;
  }
  const RuleStep by(spec().rule, step);
  return Train(call, in, waits, &by, left_out);
}

absl::Status HashTable::Accumulate(const TableCall& call, const Gradients& in, bool begin,
                                   std::vector<int32_t>* left_out) {
  uint32_t clock;
  FUSEDREC_TRY(CheckGradients(in, &clock));
  std::lock_guard<std::mutex> lock(accumulator_mutex_);
  if (begin) {
    accumulator_.Clear();
    rows_.pins().EndWait();
  }
  rows_.pins().BeginWait(clock);
  return Train(call, in, std::vector<uint8_t>(in.handles.size(), 1), nullptr, left_out);
}

absl::Status HashTable::ApplyAccumulated(const TableCall& call, const Step& step) {
  std::lock_guard<std::mutex> lock(accumulator_mutex_);
  const uint32_t version = BeginUpdate(rows_.pins().waiting_since());
  const RuleStep by(spec().rule, step);
  const std::vector<uint32_t>& handles = accumulator_.handles();
  call.parallel_for(handles.size(), 100 + 4 * format(0).numbers(), [&](int64_t begin, int64_t end) {
    std::vector<float> numbers(format(0).numbers());
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) rows_.store().FetchForUpdate(handles[i + kAhead]);
      if (*accumulator_.LeftOut(i) != 0) continue;
      UpdateRow(by, handles[i], accumulator_.Sum(i), version, numbers.data());
    }
  });
  accumulator_.Clear();
  rows_.pins().EndWait();
  return absl::OkStatus();
}

}  // namespace fusedrec
