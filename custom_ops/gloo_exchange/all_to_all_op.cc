// All-to-alls: every block is a message, an empty one as well. The computing thread copies the own block.
#include <cstring>
#include <numeric>

#include "common/shapes.h"
#include "gloo_exchange/collective.h"
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

enum Part { kRows, kSplits };  // of a call, see Collective::Slot

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

}  // namespace

// Receives of one call's splits, in the order of the set's ranks.
struct SplitsReceive {
  static std::shared_ptr<SplitsReceive> Post(const Collective& collective, uint64_t call) {
    auto receive = std::make_shared<SplitsReceive>();
    receive->splits.resize(collective.size());
    receive->buffer = Mesh::OfProcess()->Buffer(receive->splits.data(), collective.size() * sizeof(int32_t));
    collective.ForOthers([&](int i) {
      receive->buffer->recv(collective.ranks[i], collective.Slot(kSplits, call), i * sizeof(int32_t), sizeof(int32_t));
    });
    return receive;
  }

  std::vector<int32_t> splits;
  GlooBuffer buffer;
};

// The receives of one call's rows into a new tensor.
class RowsReceive {
 public:
  RowsReceive(const Collective* collective, uint64_t call, absl::Span<const int32_t> splits, Tensor rows,
              size_t row_bytes)
      : collective_(collective), splits_(splits.begin(), splits.end()), rows_(rows), row_bytes_(row_bytes),
        offsets_(Offsets(splits, row_bytes)), buffer_(Mesh::OfProcess()->Buffer(Data(), offsets_.back())) {
    collective->ForOthers([&](int i) {
      buffer_->recv(collective->ranks[i], collective->Slot(kRows, call), offsets_[i],
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

namespace {

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

// One all-to-all under way.
struct AllToAllCall {
  RunningCall running;
  absl::string_view own;                           // block of this rank
  GlooBuffer sent, sent_splits;                    // sent_splits is nullptr where the other ranks know them
  std::shared_ptr<SplitsReceive> received_splits;  // nullptr: known
  std::shared_ptr<RowsReceive> receive;            // nullptr until the splits are known
};

class ExchangeAllToAllOp : public ExchangeCallOp<AllToAllCall> {
 public:
  using ExchangeCallOp::ExchangeCallOp;

 protected:
  static TensorShape RowShape(const Tensor& rows) {
    TensorShape shape = rows.shape();
    shape.RemoveDim(0);
    return shape;
  }

  absl::Status Begin(OpKernelContext* ctx, AllToAllCall* call) const override {
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
                     absl::Span<const int32_t> expected, AllToAllCall* call) const {
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
      FUSEDREC_TRY(RunningCall::RequireNone(collective));
      if (collective.posted != nullptr) {
        FUSEDREC_TRY(RequireSame(*collective.posted, expected, row_bytes));
      } else if (known) {
        FUSEDREC_TRY(PostRows(ctx, &collective, collective.begun, expected, rows.dtype(), row_shape,
                              &collective_->posted));
      } else if (collective.next_splits == nullptr) {
        collective_->next_splits = SplitsReceive::Post(collective, collective.begun);
      }
      call->running.Begin(collective_);
      call->receive = std::move(collective_->posted);
      call->received_splits = std::move(collective_->next_splits);
    }
    const std::vector<size_t> offsets = Offsets(blocks, row_bytes);
    if (!known) {
      call->sent_splits =
          Mesh::OfProcess()->Buffer(const_cast<int32_t*>(blocks.data()), blocks.size() * sizeof(int32_t));
      collective.ForOthers([&](int i) {
        call->sent_splits->send(collective.ranks[i], collective.Slot(kSplits, call->running.number()), i * sizeof(int32_t),
                                sizeof(int32_t));
      });
    }
    const absl::string_view data = rows.tensor_data();
    call->sent = Mesh::OfProcess()->Buffer(const_cast<char*>(data.data()), offsets.back());
    collective.ForOthers([&](int i) {
      call->sent->send(collective.ranks[i], collective.Slot(kRows, call->running.number()), offsets[i],
                       offsets[i + 1] - offsets[i]);
    });
    call->own = data.substr(offsets[self], offsets[self + 1] - offsets[self]);
    if (call->receive) call->receive->CopyOwn(call->own);
    return absl::OkStatus();
  }

  absl::Status Finish(OpKernelContext* ctx, AllToAllCall* call) const override {
    if (call->sent_splits) {
      SplitsReceive& received = *call->received_splits;
      collective_->ForOthers([&](int) { received.buffer->waitRecv(); });
      received.splits[collective_->index] = In<int32_t>(ctx->input(1))[collective_->index];
      const Tensor& rows = ctx->input(0);
      FUSEDREC_TRY(PostRows(
          ctx, collective_, call->running.number(), received.splits, rows.dtype(), RowShape(rows), &call->receive));
      call->receive->CopyOwn(call->own);
      collective_->ForOthers([&](int) { call->sent_splits->waitSend(); });
      auto next = SplitsReceive::Post(*collective_, call->running.number() + 1);
      std::lock_guard<std::mutex> lock(collective_->mutex);
      collective_->next_splits = std::move(next);
    }
    call->receive->Wait();
    collective_->ForOthers([&](int) { call->sent->waitSend(); });
    return call->receive->SetOutputs(ctx);
  }
};

REGISTER_KERNEL_BUILDER(Name("Fusedrec>ExchangeExpect").Device(tensorflow::DEVICE_CPU), ExchangeExpectOp);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>ExchangeAllToAll").Device(tensorflow::DEVICE_CPU), ExchangeAllToAllOp);

}  // namespace
}  // namespace fusedrec
