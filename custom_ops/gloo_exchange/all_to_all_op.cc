// All-to-alls and small sums by messages of Gloo, without negotiation: a message is matched by the collective's name,
// its ranks and the number of the call. Lengths must be equal, too: every block is a message, an empty one as well, and
// Gloo refuses a message of another length than its receiver expects (tools/gloo.patch).
//
// A computing thread posts messages and copies the own block. A thread for each all-to-all under way sleeps until its
// messages have arrived. The ops are not stateful, because a function runs stateful ops one after another.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>

#include "common/hash.h"
#include "common/kernel_util.h"
#include "common/shapes.h"
#include "gloo/common/error.h"
#include "gloo_exchange/mesh.h"
#include "tensorflow/core/framework/common_shape_fns.h"

namespace fusedrec {
namespace {

REGISTER_OP("Fusedrec>ExchangeExpect")
    .Input("received_splits: int32")
    .Output("same: int32")
    .Attr("T: type").Attr("row_shape: shape").Attr("collective: string").Attr("ranks: list(int)")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("Posts the receives of the next ExchangeAllToAll of the collective, as soon as the splits are known.");

REGISTER_OP("Fusedrec>ExchangeAllToAll")
    .Input("rows: T").Input("splits: int32").Input("known_splits: num_known * int32")
    .Output("received: T").Output("received_splits: int32")
    .Attr("T: type").Attr("num_known: int >= 0").Attr("collective: string").Attr("ranks: list(int)")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle received;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &received));
      TF_RETURN_IF_ERROR(c->ReplaceDim(received, 0, c->UnknownDim(), &received));  // [sum of received_splits, ...]
      c->set_output(0, received);
      c->set_output(1, c->input(1));  // [R]
      return absl::OkStatus();
    })
    .Doc("Sends slices of the rows to all ranks of a set. Received splits that are not known travel in front of the rows.");

REGISTER_OP("Fusedrec>ExchangeSum")
    .Input("value: T").Output("sum: T")
    .Attr("T: {float, double, int32, int64}").Attr("collective: string").Attr("ranks: list(int)")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("Sums a small tensor over the ranks of a set, in their order: each sends it to all others.");

enum class Kind : uint64_t { kRows, kSplits };

// Threads that wait, as many as all-to-alls are under way.
class Waiters {
 public:
  static Waiters& OfProcess() {
    static auto* waiters = new Waiters;  // its threads never end
    return *waiters;
  }

  void Run(std::function<void()> wait) {
    std::lock_guard<std::mutex> lock(mutex_);
    waits_.push_back(std::move(wait));
    if (idle_ < waits_.size()) {
      std::thread([this] { Loop(); }).detach();
    } else {
      wake_.notify_one();
    }
  }

 private:
  void Loop() {
    pthread_setname_np(pthread_self(), "exchange wait");
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      wake_.wait(lock, [this] { return !waits_.empty(); });
      --idle_;
      std::function<void()> wait = std::move(waits_.front());
      waits_.pop_front();
      lock.unlock();
      wait();
      wait = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> waits_;
  size_t idle_ = 0;
};

// Receives of one call's splits.
struct SplitsReceive {
  std::vector<int32_t> splits;
  GlooBuffer buffer;
};

class RowsReceive;

// A named collective of a set of ranks. Never destroyed.
struct Collective {
  std::string name;
  std::vector<int> ranks;  // ascending
  int index = 0;           // of this rank among them
  uint64_t key = 0;
  std::mutex mutex;
  uint64_t begun = 0;  // calls
  bool running = false;
  // The receive of the next call. It stays if the call is never made, because Gloo's loop may still write to its memory.
  std::shared_ptr<RowsReceive> posted;
  std::unique_ptr<SplitsReceive> next_splits;  // of the call after the last, posted ahead

  int size() const { return static_cast<int>(ranks.size()); }

  uint64_t Slot(Kind kind, uint64_t call) const {
    return Mix64(key ^ Mix64(2 * call + static_cast<uint64_t>(kind))) | 1ULL << 63;
  }

  // Calls function(i) for the place of every other rank. Each rank begins with a different one.
  template <typename Function>
  void ForOthers(const Function& function) const {
    for (int i = 1; i < size(); ++i) function((index + i) % size());
  }

  std::unique_ptr<SplitsReceive> ReceiveSplits(uint64_t call) const {
    auto receive = std::make_unique<SplitsReceive>();
    receive->splits.resize(size());
    receive->buffer = Mesh::OfProcess()->Buffer(receive->splits.data(), size() * sizeof(int32_t));
    ForOthers([&](int i) {
      receive->buffer->recv(ranks[i], Slot(Kind::kSplits, call), i * sizeof(int32_t), sizeof(int32_t));
    });
    return receive;
  }
};

Collective* CollectiveOf(const std::string& name, const std::vector<int>& ranks) {
  static auto* mutex = new std::mutex;
  static auto* collectives = new std::map<std::pair<std::string, std::vector<int>>, Collective>;
  std::lock_guard<std::mutex> lock(*mutex);
  Collective& collective = (*collectives)[{name, ranks}];
  if (collective.ranks.empty()) {
    collective.name = name;
    collective.ranks = ranks;
    const auto self = std::find(ranks.begin(), ranks.end(), Mesh::OfProcess()->rank());
    collective.index = static_cast<int>(self - ranks.begin());
    for (const char letter : name) collective.key = Mix64(collective.key + static_cast<uint8_t>(letter) + 1);
    for (const int rank : ranks) collective.key = Mix64(collective.key + rank + 1);
  }
  return &collective;
}

// Bytes before each rank's block, and at last of all blocks.
std::vector<size_t> Offsets(absl::Span<const int32_t> splits, size_t row_bytes) {
  std::vector<size_t> offsets{0};
  for (const int32_t rows : splits) offsets.push_back(offsets.back() + rows * row_bytes);
  return offsets;
}

absl::Status RequireRows(const char* name, const Tensor& splits, int64_t size) {
  FUSEDREC_TRY(RequireRank(name, splits, 1));
  if (splits.NumElements() != size) {
    return Invalid(name, " must have one entry for each of ", size, " ranks, got ", splits.NumElements(),
                   ". Use the splits of this set of ranks.");
  }
  for (const int32_t rows : In<int32_t>(splits)) {
    if (rows < 0) return Invalid(name, " must not be negative, got ", rows, ". Use numbers of rows.");
  }
  return absl::OkStatus();
}

// The receives of one call's rows into a new tensor.
class RowsReceive {
 public:
  RowsReceive(const Collective* collective, uint64_t call, absl::Span<const int32_t> splits, Tensor rows,
              size_t row_bytes)
      : collective_(collective), splits_(splits.begin(), splits.end()), rows_(rows), row_bytes_(row_bytes),
        offsets_(Offsets(splits, row_bytes)), buffer_(Mesh::OfProcess()->Buffer(Data(), offsets_.back())) {
    collective->ForOthers([&](int i) {
      buffer_->recv(collective->ranks[i], collective->Slot(Kind::kRows, call), offsets_[i],
                    offsets_[i + 1] - offsets_[i]);
    });
  }

  void CopyOwn(absl::string_view block) {
    if (!block.empty()) std::memcpy(Data() + offsets_[collective_->index], block.data(), block.size());
  }

  void Wait() {
    collective_->ForOthers([&](int) { buffer_->waitRecv(); });
  }

  bool Expects(absl::Span<const int32_t> splits, size_t bytes) const { return splits == splits_ && bytes == row_bytes_; }

  const Tensor& rows() const { return rows_; }

  absl::Status SetOutputs(OpKernelContext* ctx) {
    ctx->set_output(0, rows_);
    return Give(ctx, 1, splits_);
  }

 private:
  char* Data() { return const_cast<char*>(rows_.tensor_data().data()); }

  const Collective* const collective_;
  const std::vector<int32_t> splits_;
  Tensor rows_;
  const size_t row_bytes_;
  const std::vector<size_t> offsets_;
  GlooBuffer buffer_;
};

// Posts the receives of a call into a new tensor of these rows.
absl::Status PostRows(OpKernelContext* ctx, const Collective* collective, uint64_t call, absl::Span<const int32_t> splits,
                      tensorflow::DataType dtype, const TensorShape& row_shape, std::shared_ptr<RowsReceive>* receive) {
  TensorShape shape = row_shape;
  shape.InsertDim(0, std::accumulate(splits.begin(), splits.end(), int64_t{0}));
  Tensor rows;
  FUSEDREC_TRY(ctx->allocate_temp(dtype, shape, &rows));
  const size_t row_bytes = row_shape.num_elements() * tensorflow::DataTypeSize(dtype);
  *receive = std::make_shared<RowsReceive>(collective, call, splits, rows, row_bytes);
  return absl::OkStatus();
}

absl::Status RequireSame(const RowsReceive& posted, absl::Span<const int32_t> splits, size_t row_bytes) {
  if (posted.Expects(splits, row_bytes)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "it has expected rows of other lengths for a call that was never made, because its step has failed. Start the "
      "program again: other ranks may have sent those rows.");
}

class ExchangeOp : public tensorflow::AsyncOpKernel {
 public:
  explicit ExchangeOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    std::string name;
    std::vector<int> ranks;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("collective", &name));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ranks", &ranks));
    OP_REQUIRES(ctx, Mesh::OfProcess() != nullptr,
                absl::FailedPreconditionError("The ranks have not joined. Use tf_fusedrec.init(exchange=\"gloo\")."));
    collective_ = CollectiveOf(name, ranks);
  }

 protected:
  // Runs a function that returns a Status or throws an error of Gloo.
  template <typename Function>
  absl::Status Try(const Function& function) const {
    std::string cause;
    try {
      const absl::Status status = function();
      if (status.ok()) return status;
      return absl::Status(status.code(), absl::StrCat("collective '", collective_->name, "': ", status.message()));
    } catch (const gloo::IoException& error) {
      cause = Mesh::OfProcess()->Cause();
      if (cause.empty()) cause = error.what();
    } catch (const std::exception& error) {
      cause = error.what();
    }
    return absl::InternalError(absl::StrCat("collective '", collective_->name, "': ", cause));
  }

  Collective* collective_ = nullptr;
};

class ExchangeExpectOp : public ExchangeOp {
 public:
  explicit ExchangeExpectOp(OpKernelConstruction* ctx) : ExchangeOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("row_shape", &row_shape_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    OP_REQUIRES_OK_ASYNC(ctx, Try([&] { return Post(ctx); }), done);
    done();
  }

 private:
  // The same splits again are no error: a step that has failed is made again, or TensorFlow has computed a constant.
  absl::Status Post(OpKernelContext* ctx) const {
    const Tensor& splits = ctx->input(0);
    FUSEDREC_TRY(RequireRows("received_splits", splits, collective_->size()));
    ctx->set_output(0, splits);
    std::lock_guard<std::mutex> lock(collective_->mutex);
    if (collective_->posted != nullptr) {
      const size_t row_bytes = row_shape_.num_elements() * tensorflow::DataTypeSize(dtype_);
      return RequireSame(*collective_->posted, In<int32_t>(splits), row_bytes);
    }
    return PostRows(ctx, collective_, collective_->begun, In<int32_t>(splits), dtype_, row_shape_, &collective_->posted);
  }

  tensorflow::DataType dtype_ = tensorflow::DT_INVALID;
  TensorShape row_shape_;
};

class ExchangeAllToAllOp : public ExchangeOp {
 public:
  using ExchangeOp::ExchangeOp;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto call = std::make_shared<Call>();
    const absl::Status begun = Try([&] { return Begin(ctx, call.get()); });
    if (!begun.ok()) return End(ctx, std::move(call), begun, done);
    Waiters::OfProcess().Run([this, ctx, done = std::move(done), call = std::move(call)]() mutable {
      const absl::Status finished = Try([&] { return Finish(ctx, call.get()); });
      End(ctx, std::move(call), finished, done);
    });
  }

 protected:
  // One all-to-all under way.
  struct Call {
    ~Call() {
      if (collective == nullptr) return;
      std::lock_guard<std::mutex> lock(collective->mutex);
      collective->running = false;
    }

    Collective* collective = nullptr;  // once the call is its running one
    uint64_t number = 0;
    Tensor copies;                                   // of the value of a sum
    absl::string_view own;                           // block of this rank
    GlooBuffer sent, sent_splits;                    // sent_splits is nullptr where the other ranks know them
    std::unique_ptr<SplitsReceive> received_splits;  // nullptr: known
    std::shared_ptr<RowsReceive> receive;            // nullptr until the splits are known
  };

  // Ends the call before its step goes on, which may free the rows or begin the next call.
  static void End(OpKernelContext* ctx, std::shared_ptr<Call> call, const absl::Status& status,
                  const DoneCallback& done) {
    call.reset();
    OP_REQUIRES_OK_ASYNC(ctx, status, done);
    done();
  }

  static TensorShape RowShape(const Tensor& rows) {
    TensorShape shape = rows.shape();
    shape.RemoveDim(0);
    return shape;
  }

  virtual absl::Status Begin(OpKernelContext* ctx, Call* call) const {
    const Tensor &rows = ctx->input(0), &splits = ctx->input(1);
    OpInputList known;
    FUSEDREC_TRY(ctx->input_list("known_splits", &known));
    FUSEDREC_TRY(RequireRows("splits", splits, collective_->size()));
    if (known.size() > 0) FUSEDREC_TRY(RequireRows("known_splits", known[0], collective_->size()));
    const auto blocks = In<int32_t>(splits);
    const int64_t total = std::accumulate(blocks.begin(), blocks.end(), int64_t{0});
    if (total > rows.dim_size(0)) {
      return Invalid("splits must have a sum of at most ", rows.dim_size(0), ", the number of rows, got ", total,
                     ". Use numbers of rows.");
    }
    if (known.size() == 0) return Start(ctx, rows, blocks, {}, call);
    return Start(ctx, rows, blocks, In<int32_t>(known[0]), call);
  }

  // Sends the blocks of `rows`, and posts the receives. expected: rows from each rank; empty: they are not known.
  absl::Status Start(OpKernelContext* ctx, const Tensor& rows, absl::Span<const int32_t> blocks,
                     absl::Span<const int32_t> expected, Call* call) const {
    const TensorShape row_shape = RowShape(rows);
    const size_t row_bytes = row_shape.num_elements() * tensorflow::DataTypeSize(rows.dtype());
    const bool known = !expected.empty();
    const Collective& collective = *collective_;
    const int self = collective.index;
    if (known && expected[self] != blocks[self]) {
      return Invalid("known_splits must have ", blocks[self], " rows of this rank, as splits, got ", expected[self],
                     ".", kEqualRanks);
    }
    {
      std::lock_guard<std::mutex> lock(collective_->mutex);
      if (collective.running) {
        return absl::FailedPreconditionError(
            "a call begins before the last one has ended. Use a name of its own for each all-to-all of a step.");
      }
      // A call that fails up to here has not begun: it has sent nothing, and the next one has its number.
      if (collective.posted != nullptr) {
        FUSEDREC_TRY(RequireSame(*collective.posted, expected, row_bytes));
      } else if (known) {
        FUSEDREC_TRY(PostRows(ctx, &collective, collective.begun, expected, rows.dtype(), row_shape,
                              &collective_->posted));
      } else if (collective.next_splits == nullptr) {
        collective_->next_splits = collective.ReceiveSplits(collective.begun);
      }
      collective_->running = true;
      call->collective = collective_;
      call->number = collective_->begun++;
      call->receive = std::move(collective_->posted);
      call->received_splits = std::move(collective_->next_splits);
    }
    const std::vector<size_t> offsets = Offsets(blocks, row_bytes);
    if (!known) {
      call->sent_splits =
          Mesh::OfProcess()->Buffer(const_cast<int32_t*>(blocks.data()), blocks.size() * sizeof(int32_t));
      collective.ForOthers([&](int i) {
        call->sent_splits->send(collective.ranks[i], collective.Slot(Kind::kSplits, call->number), i * sizeof(int32_t),
                                sizeof(int32_t));
      });
    }
    const absl::string_view data = rows.tensor_data();
    call->sent = Mesh::OfProcess()->Buffer(const_cast<char*>(data.data()), offsets.back());
    collective.ForOthers([&](int i) {
      call->sent->send(collective.ranks[i], collective.Slot(Kind::kRows, call->number), offsets[i],
                       offsets[i + 1] - offsets[i]);
    });
    call->own = data.substr(offsets[self], offsets[self + 1] - offsets[self]);
    if (call->receive) call->receive->CopyOwn(call->own);
    return absl::OkStatus();
  }

  virtual absl::Status Finish(OpKernelContext* ctx, Call* call) const {  // sleeps
    if (call->sent_splits) {
      SplitsReceive& received = *call->received_splits;
      collective_->ForOthers([&](int) { received.buffer->waitRecv(); });
      received.splits[collective_->index] = In<int32_t>(ctx->input(1))[collective_->index];
      const Tensor& rows = ctx->input(0);
      FUSEDREC_TRY(PostRows(
          ctx, collective_, call->number, received.splits, rows.dtype(), RowShape(rows), &call->receive));
      call->receive->CopyOwn(call->own);
      collective_->ForOthers([&](int) { call->sent_splits->waitSend(); });
      std::unique_ptr<SplitsReceive> next = collective_->ReceiveSplits(call->number + 1);
      std::lock_guard<std::mutex> lock(collective_->mutex);
      collective_->next_splits = std::move(next);
    }
    call->receive->Wait();
    collective_->ForOthers([&](int) { call->sent->waitSend(); });
    return call->receive->SetOutputs(ctx);
  }
};

// An all-to-all of equal blocks, which each rank sums.
template <typename T>
class ExchangeSumOp : public ExchangeAllToAllOp {
 public:
  using ExchangeAllToAllOp::ExchangeAllToAllOp;

 protected:
  absl::Status Begin(OpKernelContext* ctx, Call* call) const override {
    const Tensor& value = ctx->input(0);
    TensorShape shape = value.shape();
    shape.InsertDim(0, collective_->size());
    FUSEDREC_TRY(ctx->allocate_temp(value.dtype(), shape, &call->copies));
    for (int i = 0; i < collective_->size(); ++i) {
      std::copy_n(value.flat<T>().data(), value.NumElements(), call->copies.flat<T>().data() + i * value.NumElements());
    }
    const std::vector<int32_t> ones(collective_->size(), 1);
    return Start(ctx, call->copies, ones, ones, call);
  }

  absl::Status Finish(OpKernelContext* ctx, Call* call) const override {
    call->receive->Wait();
    collective_->ForOthers([&](int) { call->sent->waitSend(); });
    Tensor* sum;
    FUSEDREC_TRY(ctx->allocate_output(0, ctx->input(0).shape(), &sum));
    const int64_t n = sum->NumElements();
    const T* values = call->receive->rows().flat<T>().data();
    T* sums = sum->flat<T>().data();
    std::copy_n(values, n, sums);
    for (int i = 1; i < collective_->size(); ++i) {
      for (int64_t j = 0; j < n; ++j) sums[j] += values[i * n + j];
    }
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("Fusedrec>ExchangeExpect").Device(tensorflow::DEVICE_CPU), ExchangeExpectOp);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>ExchangeAllToAll").Device(tensorflow::DEVICE_CPU), ExchangeAllToAllOp);
#define FUSEDREC_REGISTER_SUM(T) \
  REGISTER_KERNEL_BUILDER( \
      Name("Fusedrec>ExchangeSum").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), ExchangeSumOp<T>)
FUSEDREC_REGISTER_SUM(float);
FUSEDREC_REGISTER_SUM(double);
FUSEDREC_REGISTER_SUM(int32_t);
FUSEDREC_REGISTER_SUM(int64_t);

}  // namespace
}  // namespace fusedrec
