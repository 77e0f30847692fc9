// Kernels of the update: they sum gradients over their sources and apply the rule in place (rules/rule.h).
//
// Sixteen lanes share a row. They add the gradients of a column in the order received. A sum over columns is sixteen sums
// of every sixteenth column, added in pairs. The CPU does the same (gradient_sum.h, rule_step.cc), so rows have the same
// bits.
//
// Gradients may wait for an update: a sum per row over several lookups, or parts of one (gradient_sum.h). A row's number
// leads to its sum without a search. Each call numbers the rows of all its handles, which are distinct, by their places.
// So no threads contend, and a sum adds the totals of the calls in their order, as on the CPU.
#include "common/sort.cuh"
#include "hash_table/cuda/message.cuh"
#include "hash_table/cuda/rows.cuh"
#include "hash_table/rules/rule.h"

namespace fusedrec::device_table {

constexpr int kRowLanes = 16;  // of one row

// begin[u], for u in [0, num_rows]: number of sorted positions before the first one of row u. rows: of sorted positions.
FUSEDREC_KERNEL BeginsKernel(const uint32_t* __restrict__ rows, int64_t num_index, int64_t num_rows,
                             int32_t* __restrict__ begin) {
  const int64_t p = GlobalThread();
  if (p > num_index) return;
  const int64_t row = p < num_index ? rows[p] : num_rows;
  for (int64_t u = p > 0 ? int64_t{rows[p - 1]} + 1 : 0; u <= row; ++u) begin[u] = static_cast<int32_t>(p);
}

// The summed gradient of one row, a column at a time.
struct GradientColumns {
  const void* grads;
  Storage storage;
  const int32_t* order;  // sorted positions; null: each position stands at itself
  int32_t begin, end;
  int dim;
  float scale, clip;  // clip: factor of the clipped gradient

  __device__ float Sum(int d) const {
    float sum = 0.0f;
    for (int32_t p = begin; p < end; ++p) {
      const int64_t position = order == nullptr ? p : order[p];
      const float grad = LoadNumber(storage, grads, position * dim + d) * scale;
      sum = p == begin ? grad : sum + grad;
    }
    return sum;
  }
  __device__ float operator()(int d) const { return clip == 1.0f ? Sum(d) : Sum(d) * clip; }

  // Sum of squares, the same for all lanes of the row.
  __device__ float Squares(unsigned mask) const {
    float part = 0.0f;
    for (int d = threadIdx.x % kRowLanes; d < dim; d += kRowLanes) {
      const float x = (*this)(d);
      part += x * x;
    }
    for (int half = kRowLanes / 2; half > 0; half /= 2) part += __shfl_down_sync(mask, part, half, kRowLanes);
    return __shfl_sync(mask, part, 0, kRowLanes);
  }
  // The norm where float squares overflow or vanish.
  __device__ float NormInDouble() const {
    double sum = 0;
    for (int d = 0; d < dim; ++d) {
      const float x = (*this)(d);
      sum += static_cast<double>(x) * x;
    }
    return static_cast<float>(sqrt(sum));
  }
};

// Numbers of one row, float32 in between.
struct RowColumns {
  const RowLayout& layout;
  char* row;
  uint32_t version;

  __device__ float Load(int d) const { return LoadNumber(layout.storage, row, d); }
  __device__ void Store(float x, int d) const {
    StoreNumber(layout.storage, x, row, d, layout.stochastic, static_cast<uint32_t>(d), version);
  }
  __device__ float Slot(int k, int d) const {
    return LoadNumber(layout.slot_storage, row + layout.wide_offset, k * layout.dim + d);
  }
  __device__ void StoreSlot(float x, int k, int d) const {
    StoreNumber(layout.slot_storage, x, row + layout.wide_offset, k * layout.dim + d, layout.stochastic,
                static_cast<uint32_t>(layout.dim * (1 + k) + d), version);
  }
};

template <class R>
__device__ inline void UpdateColumn(bool form, const typename R::Numbers& by, float g, int d, const RowColumns& row) {
  float w = row.Load(d), slots[R::kSlots + 1];
  for (int k = 0; k < R::kSlots; ++k) slots[k] = row.Slot(k, d);
  if (form) {
    R::template Column<true>(by, g, w, slots);
  } else {
    R::template Column<false>(by, g, w, slots);
  }
  row.Store(w, d);
  for (int k = 0; k < R::kSlots; ++k) row.StoreSlot(slots[k], k, d);
}

// Rows of `handles`, whose gradients are the sorted positions [begin[u], begin[u + 1]); begin null: position u alone. A
// negative handle names no row. A row whose sum is not finite stays as it is; its u goes to left_out [*num_left_out], in
// any order, unless left_out is null.
template <class R>
FUSEDREC_KERNEL UpdateKernel(TableView table, const int64_t* __restrict__ handles, int64_t num_rows,
    const int32_t* __restrict__ begin, GradientColumns grads, R rule, typename R::Numbers by, bool leaves_rows,
    uint32_t version, int32_t* __restrict__ left_out, unsigned* num_left_out) {
  const int64_t u = GlobalThread() / kRowLanes;
  if (u >= num_rows) return;
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const unsigned mask = 0xffffu << (threadIdx.x & 16);
  if (handles[u] < 0) return;
  const uint32_t row = static_cast<uint32_t>(handles[u]);
  const StoredRow at = table.At(row);
  const RowColumns columns{at.layout, at.data, version};
  grads.begin = begin == nullptr ? static_cast<int32_t>(u) : begin[u];
  grads.end = begin == nullptr ? grads.begin + 1 : begin[u + 1];
  if (grads.begin == grads.end) return;  // of another part of the lookup
  bool is_finite = true;
  for (int d = lane; d < grads.dim; d += kRowLanes) is_finite = is_finite && IsFinite(grads.Sum(d));
  if (!__all_sync(mask, is_finite)) {
    if (lane == 0 && left_out != nullptr) left_out[atomicAdd(num_left_out, 1u)] = static_cast<int32_t>(u);
    return;
  }
  if (rule.clipnorm > 0) {
    const float squares = grads.Squares(mask);
    const bool plain = squares > kSmallestSquares && squares < kLargestSquares;
    const float norm = plain ? sqrtf(squares) : grads.NormInDouble();
    if (norm > rule.clipnorm) grads.clip = rule.clipnorm / norm;
  }
  if constexpr (R::kRowSlots > 0) {
    static_assert(R::kRowSlots == 1);
    float* const stored = reinterpret_cast<float*>(columns.row + at.layout.scalars_offset);
    float slot = *stored;
    by = rule.OfRow(by, grads.Squares(mask), grads.dim, &slot);
    __syncwarp(mask);
    if (lane == 0) *stored = slot;
  }
  if (lane == 0) table.Meta(row)->updated = version;
  if (leaves_rows) return;
  for (int d = lane; d < grads.dim; d += kRowLanes) UpdateColumn<R>(rule.form(), by, grads(d), d, columns);
}

// Checks of handles and of an inverse before a kernel follows them. In TensorFlow they are ordinary tensors, and an index
// out of range would end the process. The same pass tells whether gradients are finite.

constexpr unsigned kHandleBlocks = 132 * 4;  // of a loop that waits for memory alone

__device__ inline unsigned Smaller(unsigned a, unsigned b) { return a < b ? a : b; }

FUSEDREC_KERNEL HandleFactsKernel(TableView table, const int64_t* __restrict__ handles, int64_t num_handles,
                                  const int32_t* __restrict__ inverse, int64_t num_ids, int64_t num_rows, Numbers grads,
                                  const uint32_t* __restrict__ sum_of_row, uint32_t attempt, HandleFacts* facts) {
  unsigned oldest = ~0u, newest = ~0u;
  const bool trains = inverse != nullptr;  // an id that admission refused has the handle -1
  bool handles_are_sound = true, inverse_is_sound = true, grads_are_finite = true, all_have_sums = sum_of_row != nullptr;
  bool handles_are_distinct = true;
  const int64_t threads = GridThreads();
  for (int64_t n = GlobalThread(); n < num_handles; n += threads) {
    const int64_t handle = handles[n];
    if (trains && handle == -1) continue;
    const unsigned clock = static_cast<unsigned>(static_cast<uint64_t>(handle) >> 32);
    handles_are_sound = handles_are_sound && handle >= 0 && (handle & 0xffffffff) < num_rows;
    all_have_sums = all_have_sums && handles_are_sound && sum_of_row[handle & 0xffffffff] != kNowhere;
    oldest = Smaller(oldest, clock);
    newest = Smaller(newest, ~clock);
    if (!trains || !handles_are_sound) continue;
    RowMeta* const meta = table.Meta(static_cast<uint32_t>(handle));
    const unsigned long long touched = atomicMax(&meta->touch, TouchOf(attempt, static_cast<uint32_t>(n)));
    handles_are_distinct = handles_are_distinct && AttemptOf(touched) != attempt;
  }
  if (inverse != nullptr) {
    for (int64_t n = GlobalThread(); n < num_ids; n += threads) {
      inverse_is_sound = inverse_is_sound && 0 <= inverse[n] && inverse[n] < num_handles;
    }
  }
  for (int64_t n = GlobalThread(); n < grads.count; n += threads) {
    grads_are_finite = grads_are_finite && IsFinite(LoadNumber(grads.storage, grads.data, n));
  }
  for (int d = 16; d > 0; d >>= 1) {
    oldest = Smaller(oldest, __shfl_xor_sync(kFullWarp, oldest, d));
    newest = Smaller(newest, __shfl_xor_sync(kFullWarp, newest, d));
  }
  handles_are_sound = __all_sync(kFullWarp, handles_are_sound);
  handles_are_distinct = __all_sync(kFullWarp, handles_are_distinct);
  inverse_is_sound = __all_sync(kFullWarp, inverse_is_sound);
  grads_are_finite = __all_sync(kFullWarp, grads_are_finite);
  all_have_sums = __all_sync(kFullWarp, all_have_sums);
  if (Lane() != 0) return;
  if (oldest != ~0u) atomicMin(&facts->oldest, oldest);
  if (newest != ~0u) atomicMin(&facts->newest, newest);
  if (!handles_are_sound) facts->handles_are_sound = 0;
  if (!handles_are_distinct) facts->handles_are_distinct = 0;
  if (!inverse_is_sound) facts->inverse_is_sound = 0;
  if (!grads_are_finite) facts->grads_are_finite = 0;
  if (!all_have_sums) facts->all_have_sums = 0;
}

}  // namespace fusedrec::device_table

#ifndef __CUDACC_RTC__
#include "hash_table/cuda/table_memory.h"

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
    const int32_t* __restrict__ begin, GradientColumns grads, int32_t* __restrict__ left_out, unsigned* num_left_out) {
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
    return in.num_rows <= kDeviceTableMaxIds && in.num_ids <= kDeviceTableMaxIds;
  }

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
  if (!Update::HasSizes(*gradients)) return kCudaInvalidValue;
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
    const GradientColumns& grads, const Step& step, int32_t* left_out, unsigned* num_left_out, void* stream) const {
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
#endif
