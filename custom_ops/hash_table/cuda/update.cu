// Updates (update.cuh), and gradients that wait for one: a sum per row over several lookups, or parts of one
// (gradient_sum.h).
//
// A row's number leads to its sum, without a search. Each call numbers the rows of all its handles, which are distinct, by
// their places. So no threads contend, and a sum adds the totals of the calls in their order, as on the CPU.
#include <algorithm>
#include <utility>

#include "hash_table/cuda/table_memory.h"
#include "hash_table/cuda/update.cuh"

namespace {

// Sums [first, first + num_handles) for the rows without one.
FUSEDREC_KERNEL NumberSumsKernel(SumsView view, const int64_t* __restrict__ handles, int64_t num_handles,
                                 int64_t first) {
  const int64_t u = GlobalThread();
  if (u >= num_handles) return;
  const uint32_t row = static_cast<uint32_t>(handles[u]);
  view.rows[first + u] = ~static_cast<int64_t>(row);
  if (row == kNowhere) return;  // admission refused the id
  if (view.sum_of_row[row] == kNowhere) view.sum_of_row[row] = static_cast<uint32_t>(first + u);
}

// Adds the gradients of each handle, if it has any. u goes to left_out where the sum ceases to be finite.
FUSEDREC_KERNEL AddToSumsKernel(SumsView view, const int64_t* __restrict__ handles, int64_t num_handles,
                                const int32_t* __restrict__ begin, GradientColumns grads,
                                int32_t* __restrict__ left_out, unsigned* num_left_out) {
  const int64_t u = GlobalThread() / kRowLanes;
  if (u >= num_handles || handles[u] < 0) return;
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const unsigned mask = 0xffffu << (threadIdx.x & 16);
  grads.begin = begin[u];
  grads.end = begin[u + 1];
  if (grads.begin == grads.end) return;
  const uint32_t row = static_cast<uint32_t>(handles[u]), number = view.sum_of_row[row];
  float* const sum = view.sums + static_cast<int64_t>(number) * grads.dim;
  bool was_finite = true, is_finite = true;
  for (int d = lane; d < grads.dim; d += kRowLanes) {
    const float before = sum[d], now = before + grads.Sum(d);
    was_finite = was_finite && IsFinite(before);
    is_finite = is_finite && IsFinite(now);
    sum[d] = now;
  }
  was_finite = __all_sync(mask, was_finite);
  is_finite = __all_sync(mask, is_finite);
  if (lane != 0) return;
  view.rows[number] = row;
  if (was_finite && !is_finite) left_out[atomicAdd(num_left_out, 1u)] = static_cast<int32_t>(u);
}

FUSEDREC_KERNEL ForgetSumsKernel(SumsView view, int64_t num_sums) {
  const int64_t n = GlobalThread(), row = n < num_sums ? view.rows[n] : kNowhere;
  const int64_t known = row < 0 ? ~row : row;
  if (known != kNowhere) view.sum_of_row[known] = kNowhere;
}

// An update: the gradients of each handle, in the order received.
class Update {
 public:
  Update(FusedrecDeviceTable* table, const FusedrecGradients& in, void* stream)
      : table_(table), in_(in), stream_(stream), memory_(&table->allocator_) {}

  static bool HasSizes(const FusedrecGradients& in) {
    return in.storage >= 0 && in.storage <= 2 && in.num_rows >= 0 && in.num_rows <= kDeviceTableMaxIds && in.num_ids >= 0 &&
           in.num_ids <= kDeviceTableMaxIds;
  }

  // Allocates and checks. sum_of_row: as in CheckHandles.
  int Begin(const uint32_t* sum_of_row) {
    FUSEDREC_TRY(memory_.Take({{&begin_, in_.num_rows + 1}, {&count_, 1}}));
    FUSEDREC_TRY(sort_.Take(in_.num_ids, &memory_));
    FUSEDREC_TRY(table_->CheckHandles(in_, sum_of_row, ++table_->attempt_, &facts_, stream_));
    return int64_t{facts_.oldest} <= table_->stale_until_ ? kDeviceStale : kCudaSuccess;
  }
  // launch(begin, columns, count) uses the gradients, unless every handle is of another part of the lookup, and counts the
  // rows that it leaves out.
  template <typename Launch>
  int Use(const Launch& launch, int64_t* num_left_out) {
    if (in_.num_ids == 0) return LastError();
    Sorted sorted;
    FUSEDREC_TRY(sort_.ByRow(in_.inverse, in_.num_rows, &sorted, stream_));
    FUSEDREC_FOR_EACH(BeginsKernel, in_.num_ids + 1, stream_, sorted.keys, in_.num_ids, in_.num_rows, begin_);
    FUSEDREC_TRY(Fill(count_, 0, sizeof(*count_), stream_));
    const Storage storage = static_cast<Storage>(in_.storage);
    launch(begin_, GradientColumns{in_.grads, storage, sorted.positions, 0, 0, table_->layout_.dim, in_.scale, 1.0f}, count_);
    if (facts_.grads_are_finite != 0) return LastError();
    unsigned counted;
    FUSEDREC_TRY(CopyToHost(&counted, count_, 1, stream_));
    *num_left_out = counted;
    return LastError();
  }
  const HandleFacts& facts() const { return facts_; }

 private:
  FusedrecDeviceTable* const table_;
  const FusedrecGradients& in_;
  void* const stream_;
  ScratchMemory memory_;
  PositionSort sort_;
  int32_t* begin_ = nullptr;   // [num_rows + 1]
  unsigned* count_ = nullptr;  // of the rows that are left out
  HandleFacts facts_;
};

// Replaces `old`, of which the first `kept` stay; the others get this byte.
template <typename T>
int Replace(Array<T> larger, int64_t kept, int byte, Array<T>* old, void* stream) {
  FUSEDREC_TRY(Fill(larger.data() + kept, byte, (larger.size() - kept) * sizeof(T), stream));
  FUSEDREC_TRY(CopyOnDevice(larger.data(), old->data(), kept, stream));
  *old = std::move(larger);
  return kCudaSuccess;
}

}  // namespace

int fusedrec_table_apply(FusedrecDeviceTable* table, const FusedrecGradients* gradients, const Step* step,
                         int32_t* left_out, int64_t* num_left_out, void* stream) {
  *num_left_out = 0;
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (!Update::HasSizes(*gradients) || step->number < 1) return kCudaInvalidValue;
  if (gradients->num_rows == 0) {
    if (gradients->num_ids > 0) return kDeviceBadInverse;
    ++table->version_;
    return kCudaSuccess;
  }
  Update update(table, *gradients, stream);
  FUSEDREC_TRY(update.Begin(nullptr));
  ++table->version_;
  const auto train = [&](const int32_t* begin, const GradientColumns& columns, unsigned* count) {
    table->Train(gradients->handles, gradients->num_rows, begin, columns, *step, left_out, count, stream);
  };
  return update.Use(train, num_left_out);
}

void FusedrecDeviceTable::Train(const int64_t* handles, int64_t num_rows, const int32_t* begin,
                                const GradientColumns& grads, const Step& step, int32_t* left_out, unsigned* num_left_out,
                                void* stream) const {
  const uint32_t version = version_;
  std::visit(
      [&](const auto& rule) {
        using R = std::decay_t<decltype(rule)>;
        FUSEDREC_FOR_EACH(UpdateKernel<R>, num_rows * kRowLanes, stream, View(), handles, num_rows, begin, grads, rule,
                          rule.Prepare(step), R::LeavesRows(step), version, left_out, num_left_out);
      },
      rule_);
}

int FusedrecDeviceTable::CheckHandles(const FusedrecGradients& in, const uint32_t* sum_of_row, uint32_t attempt,
                                      HandleFacts* known, void* stream) const {
  HandleFacts* facts;
  ScratchMemory memory(&allocator_);
  FUSEDREC_TRY(memory.Take({{&facts, 1}}));
  FUSEDREC_TRY(Fill(facts, 0xff, sizeof(HandleFacts), stream));
  const Numbers grads{in.grads, static_cast<Storage>(in.storage), in.num_ids * layout_.dim};
  const int64_t most = std::max({in.num_rows, in.num_ids, grads.count});
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(BlocksFor(most, kThreads), kHandleBlocks));
  FUSEDREC_LAUNCH(HandleFactsKernel, blocks, kThreads, 0, stream, View(), in.handles, in.num_rows, in.inverse, in.num_ids,
                  rows_.next, grads, sum_of_row, attempt, facts);
  FUSEDREC_TRY(LastError());
  FUSEDREC_TRY(CopyToHost(known, facts, 1, stream));
  if (known->handles_are_sound == 0) return kDeviceBadHandle;
  const bool names_rows = known->oldest != ~0u;
  // All handles must be of one past lookup. Handles of an export have no clock and cannot be trained.
  const bool is_one_lookup = known->oldest == ~known->newest && known->oldest != 0 && known->oldest <= clock_;
  if (in.inverse != nullptr && names_rows && !is_one_lookup) return kDeviceBadHandle;
  if (known->handles_are_distinct == 0) return kDeviceDoubled;
  return known->inverse_is_sound == 0 ? kDeviceBadInverse : kCudaSuccess;
}

int fusedrec_table_accumulate(FusedrecDeviceTable* table, const FusedrecGradients* gradients, int begin, int32_t* left_out,
                              int64_t* num_left_out, void* stream) {
  *num_left_out = 0;
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (!Update::HasSizes(*gradients)) return kCudaInvalidValue;
  const int64_t num_rows = gradients->num_rows;
  if (num_rows == 0) {
    if (gradients->num_ids > 0) return kDeviceBadInverse;
    return begin ? table->DropSums(stream) : kCudaSuccess;
  }
  FusedrecDeviceTable::Waiting& waiting = table->waiting_;
  Update update(table, *gradients, stream);
  const bool rows_are_numbered = !begin && waiting.count > 0 && table->SumsCoverRows();
  FUSEDREC_TRY(update.Begin(rows_are_numbered ? waiting.sum_of_row.data() : nullptr));
  const HandleFacts& facts = update.facts();
  // All memory, before anything changes.
  const int64_t kept = begin ? 0 : waiting.count, more = facts.all_have_sums == 0 ? num_rows : 0;
  FusedrecDeviceTable::Waiting grown;
  FUSEDREC_TRY(table->AllocateSums(kept, more, &grown));
  if (begin) FUSEDREC_TRY(table->DropSums(stream));
  if (more > 0) FUSEDREC_TRY(table->GrowSums(std::move(grown), gradients->handles, more, stream));
  const bool names_rows = facts.oldest != ~0u;
  if (names_rows && (waiting.since == 0 || facts.oldest < waiting.since)) waiting.since = facts.oldest;
  const auto add = [&](const int32_t* begin, const GradientColumns& columns, unsigned* count) {
    FUSEDREC_FOR_EACH(AddToSumsKernel, num_rows * kRowLanes, stream, waiting.view(), gradients->handles, num_rows, begin,
                      columns, left_out, count);
  };
  return update.Use(add, num_left_out);
}

int fusedrec_table_apply_accumulated(FusedrecDeviceTable* table, const Step* step, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  if (step->number < 1) return kCudaInvalidValue;
  ++table->version_;
  if (table->waiting_.count > 0) {
    const SumsView view = table->waiting_.view();
    const GradientColumns columns{view.sums, Storage::kFloat32, nullptr, 0, 0, table->layout_.dim, 1.0f, 1.0f};
    table->Train(view.rows, table->waiting_.count, nullptr, columns, *step, nullptr, nullptr, stream);
  }
  return table->DropSums(stream);
}

int FusedrecDeviceTable::AllocateSums(int64_t kept, int64_t more, Waiting* grown) const {
  if (more == 0) return kCudaSuccess;
  grown->count = kept + more;
  if (grown->count >= kDeviceTableMaxRows) return kDeviceOutOfMemory;
  const int64_t rows = static_cast<int64_t>(rows_.memory.size()) * chunk_rows();
  if (!SumsCoverRows()) FUSEDREC_TRY(grown->sum_of_row.Allocate(allocator_, rows));
  FUSEDREC_TRY(grown->rows.Allocate(allocator_, grown->count));
  return grown->sums.Allocate(allocator_, grown->count * layout_.dim);
}

int FusedrecDeviceTable::GrowSums(Waiting grown, const int64_t* handles, int64_t more, void* stream) {
  const int64_t kept = waiting_.count;
  if (grown.sum_of_row.data() != nullptr) {
    const int64_t known = waiting_.sum_of_row.size();
    FUSEDREC_TRY(Replace(std::move(grown.sum_of_row), known, 0xff, &waiting_.sum_of_row, stream));
  }
  FUSEDREC_TRY(Replace(std::move(grown.rows), kept, 0, &waiting_.rows, stream));
  FUSEDREC_TRY(Replace(std::move(grown.sums), kept * layout_.dim, 0, &waiting_.sums, stream));
  waiting_.count = grown.count;
  FUSEDREC_FOR_EACH(NumberSumsKernel, more, stream, waiting_.view(), handles, more, kept);
  return LastError();
}

int FusedrecDeviceTable::DropSums(void* stream) {
  FUSEDREC_FOR_EACH(ForgetSumsKernel, waiting_.count, stream, waiting_.view(), waiting_.count);
  // The numbers of rows stay: all of them say that there is no sum.
  waiting_.rows = {};
  waiting_.sums = {};
  waiting_.count = waiting_.since = 0;
  return LastError();
}
