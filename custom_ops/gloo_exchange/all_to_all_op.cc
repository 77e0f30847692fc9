// All-to-alls: every block is a message, an empty one as well. The computing thread copies the own block.
//
// Several tensors share a message for their small blocks, because a small message costs by its number. Both ranks copy
// these blocks, so a large one has a separate message. All tensors arrive together.
#include <cstring>
#include <numeric>

#include "common/shapes.h"
#include "gloo_exchange/collective.h"
#include "tensorflow/core/framework/common_shape_fns.h"

namespace fusedrec {
namespace {

REGISTER_OP("Fusedrec>ExchangeExpect")
    .Input("received_splits: N * int32")
    .Output("same: N * int32")
    .Attr("N: int >= 1").Attr("T: list(type)").Attr("row_shapes: list(shape)").Attr("collective: string")
    .Attr("ranks: list(int)")
    .SetShapeFn(Shapes("N*[r] -> N*[r]"))
    .Doc("Posts the receives of the next ExchangeAllToAll of the collective, as soon as the splits are known.");

REGISTER_OP("Fusedrec>ExchangeAllToAll")
    .Input("rows: T").Input("splits: N * int32").Input("known_splits: num_known * int32")
    .Output("received: T").Output("received_splits: N * int32")
    .Attr("T: list(type)").Attr("N: int >= 1").Attr("num_known: int >= 0").Attr("collective: string")
    .Attr("ranks: list(int)")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      int n;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      for (int i = 0; i < n; ++i) {
        tensorflow::shape_inference::ShapeHandle received;
        TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(i), 1, &received));
        TF_RETURN_IF_ERROR(c->ReplaceDim(received, 0, c->UnknownDim(), &received));  // [sum of received_splits, ...]
        c->set_output(i, received);
        c->set_output(n + i, c->input(n + i));  // [R]
      }
      return absl::OkStatus();
    })
    .Doc("Sends slices of the rows of each tensor to all ranks of a set. Received splits that are not known travel in "
         "front of the rows, which are of one tensor.");

// Messages of a call, see Collective::Slot.
enum Part { kRows, kSplits, kSeparate };  // kSeparate + t: a block of tensor t

// Bytes of a block from which its two copies cost more than a message.
constexpr size_t kLarge = 64 * 1024;

using UnboundBuffer = gloo::transport::UnboundBuffer;
using Splits = std::vector<std::vector<int32_t>>;  // rows of each block, by tensor and rank

struct RowForm {
  bool operator==(const RowForm& other) const { return dtype == other.dtype && shape == other.shape; }

  tensorflow::DataType dtype;
  TensorShape shape;
};

std::vector<RowForm> FormsOf(const OpInputList& rows) {
  std::vector<RowForm> forms;
  for (const Tensor& tensor : rows) {
    TensorShape shape = tensor.shape();
    shape.RemoveDim(0);
    forms.push_back({tensor.dtype(), shape});
  }
  return forms;
}

// Checks the splits of each tensor, and reads them.
absl::Status ReadSplits(const char* name, const OpInputList& splits, int64_t ranks, Splits* out) {
  for (const Tensor& of_tensor : splits) {
    FUSEDREC_TRY(RequireRows(name, of_tensor, ranks));
    const auto blocks = In<int32_t>(of_tensor);
    out->emplace_back(blocks.begin(), blocks.end());
  }
  return absl::OkStatus();
}

int64_t Total(const std::vector<int32_t>& splits) { return std::accumulate(splits.begin(), splits.end(), int64_t{0}); }

// Blocks of one or several tensors by rank, and the messages that carry them.
struct Blocks {
  absl::Status Set(OpKernelContext* ctx, std::vector<Tensor> of_tensors, const std::vector<RowForm>& forms,
                   const Splits& splits) {
    tensors = std::move(of_tensors);
    messages.assign(splits[0].size() + 1, 0);
    for (size_t t = 0; t < tensors.size(); ++t) {
      const size_t row_bytes = forms[t].shape.num_elements() * tensorflow::DataTypeSize(forms[t].dtype);
      begins.push_back({0});
      for (const int32_t rows : splits[t]) begins[t].push_back(begins[t].back() + rows * row_bytes);
      for (size_t i = 0; i < splits[t].size(); ++i) messages[i + 1] += IsSeparate(t, i) ? 0 : Bytes(t, i);
    }
    std::partial_sum(messages.begin(), messages.end(), messages.begin());
    joined = tensors[0];
    if (tensors.size() > 1) {
      const TensorShape shape({static_cast<int64_t>(messages.back())});
      FUSEDREC_TRY(ctx->allocate_temp(tensorflow::DT_INT8, shape, &joined));
      for (size_t t = 0; t < tensors.size(); ++t) {
        separate.push_back(Mesh::OfProcess()->Buffer(Data(tensors[t]), begins[t].back()));
      }
    }
    buffer = Mesh::OfProcess()->Buffer(Data(joined), messages.back());
    return absl::OkStatus();
  }

  // Calls function(buffer, part, offset, bytes) for each message of a rank.
  template <typename Function>
  void ForMessages(int rank, const Function& function) const {
    function(buffer.get(), kRows, messages[rank], messages[rank + 1] - messages[rank]);
    for (size_t t = 0; t < tensors.size(); ++t) {
      if (IsSeparate(t, rank)) function(separate[t].get(), kSeparate + t, begins[t][rank], Bytes(t, rank));
    }
  }

  // Copies a rank's small blocks to their message, or from there.
  void CopySmall(int rank, bool to_message) const {
    char* message = Data(joined) + messages[rank];
    for (size_t t = 0; tensors.size() > 1 && t < tensors.size(); ++t) {
      const size_t bytes = IsSeparate(t, rank) ? 0 : Bytes(t, rank);
      if (bytes > 0) std::memcpy(to_message ? message : Block(t, rank), to_message ? Block(t, rank) : message, bytes);
      message += bytes;
    }
  }

  void CopyOwn(const Blocks& from, int rank) const {
    for (size_t t = 0; t < tensors.size(); ++t) {
      if (Bytes(t, rank) > 0) std::memcpy(Block(t, rank), from.Block(t, rank), Bytes(t, rank));
    }
  }

  char* Block(size_t tensor, int rank) const { return Data(tensors[tensor]) + begins[tensor][rank]; }
  size_t Bytes(size_t tensor, int rank) const { return begins[tensor][rank + 1] - begins[tensor][rank]; }
  bool IsSeparate(size_t tensor, int rank) const { return tensors.size() > 1 && Bytes(tensor, rank) >= kLarge; }
  static char* Data(const Tensor& tensor) { return const_cast<char*>(tensor.tensor_data().data()); }

  std::vector<Tensor> tensors;
  std::vector<std::vector<size_t>> begins;  // bytes of a tensor before each rank's block, and at last of all blocks
  std::vector<size_t> messages;             // bytes before each rank's message, and at last of all messages
  Tensor joined;                            // all messages; of one tensor, its own memory
  std::vector<GlooBuffer> separate;         // of tensors
  GlooBuffer buffer;                        // of joined
};

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

// The receives of one call's rows into new tensors.
class RowsReceive {
 public:
  static absl::Status Post(OpKernelContext* ctx, const Collective& collective, uint64_t call,
                           const std::vector<RowForm>& forms, const Splits& splits, std::shared_ptr<RowsReceive>* out) {
    auto receive = std::make_shared<RowsReceive>();
    receive->forms_ = forms;
    receive->splits_ = splits;
    std::vector<Tensor> rows(forms.size());
    for (size_t t = 0; t < forms.size(); ++t) {
      TensorShape shape = forms[t].shape;
      shape.InsertDim(0, Total(splits[t]));
      FUSEDREC_TRY(ctx->allocate_temp(forms[t].dtype, shape, &rows[t]));
    }
    FUSEDREC_TRY(receive->blocks_.Set(ctx, std::move(rows), forms, splits));
    collective.ForOthers([&](int i) {
      receive->blocks_.ForMessages(i, [&](UnboundBuffer* buffer, int part, size_t offset, size_t bytes) {
        buffer->recv(collective.ranks[i], collective.Slot(part, call), offset, bytes);
      });
    });
    *out = std::move(receive);
    return absl::OkStatus();
  }

  void Wait(const Collective& collective) {
    collective.ForOthers([&](int i) {
      blocks_.ForMessages(i, [](UnboundBuffer* buffer, int, size_t, size_t) { buffer->waitRecv(); });
    });
    collective.ForOthers([&](int i) { blocks_.CopySmall(i, /*to_message=*/false); });
  }

  absl::Status RequireSame(const std::vector<RowForm>& forms, const Splits& splits) const {
    if (forms == forms_ && splits == splits_) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "it has expected rows of other lengths for a call that was never made, because its step has failed. Start the "
        "program again: other ranks may have sent those rows.");
  }

  absl::Status SetOutputs(OpKernelContext* ctx) {
    const int n = static_cast<int>(splits_.size());
    for (int t = 0; t < n; ++t) {
      ctx->set_output(t, blocks_.tensors[t]);
      FUSEDREC_TRY(Give(ctx, n + t, splits_[t]));
    }
    return absl::OkStatus();
  }

  const Blocks& blocks() const { return blocks_; }

 private:
  std::vector<RowForm> forms_;
  Splits splits_;
  Blocks blocks_;
};

namespace {

class ExchangeExpectOp : public ExchangeOp {
 public:
  explicit ExchangeExpectOp(OpKernelConstruction* ctx) : ExchangeOp(ctx) {
    std::vector<tensorflow::DataType> dtypes;
    std::vector<TensorShape> shapes;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtypes));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("row_shapes", &shapes));
    OP_REQUIRES(ctx, dtypes.size() == shapes.size() && static_cast<int>(shapes.size()) == ctx->num_inputs(),
                Invalid("row_shapes and T must have one entry for each of ", ctx->num_inputs(), " tensors, got ",
                        shapes.size(), " and ", dtypes.size(), "."));
    for (size_t t = 0; t < dtypes.size(); ++t) forms_.push_back({dtypes[t], shapes[t]});
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    OP_REQUIRES_OK_ASYNC(ctx, Try([&] { return Post(ctx); }), done);
    done();
  }

 private:
  // The same splits again are no error: a step that has failed is made again, or TensorFlow has computed a constant.
  absl::Status Post(OpKernelContext* ctx) const {
    OpInputList inputs;
    Splits splits;
    FUSEDREC_TRY(ctx->input_list("received_splits", &inputs));
    FUSEDREC_TRY(ReadSplits("received_splits", inputs, collective_->size(), &splits));
    for (int i = 0; i < inputs.size(); ++i) ctx->set_output(i, inputs[i]);
    std::lock_guard<std::mutex> lock(collective_->mutex);
    if (collective_->posted != nullptr) return collective_->posted->RequireSame(forms_, splits);
    return RowsReceive::Post(ctx, *collective_, collective_->begun, forms_, splits, &collective_->posted);
  }

  std::vector<RowForm> forms_;
};

// One all-to-all under way.
struct AllToAllCall {
  RunningCall running;
  Splits splits;                                   // of this rank's rows
  Blocks blocks;                                   // that it sends
  GlooBuffer sent_splits;                          // nullptr where the other ranks know them
  std::shared_ptr<SplitsReceive> received_splits;  // nullptr: known
  std::shared_ptr<RowsReceive> receive;            // nullptr until the splits are known
};

class ExchangeAllToAllOp : public ExchangeCallOp<AllToAllCall> {
 public:
  using ExchangeCallOp::ExchangeCallOp;

 protected:
  absl::Status Begin(OpKernelContext* ctx, AllToAllCall* call) const override {
    OpInputList rows, splits, known;
    Splits expected;
    FUSEDREC_TRY(ctx->input_list("rows", &rows));
    FUSEDREC_TRY(ctx->input_list("splits", &splits));
    FUSEDREC_TRY(ctx->input_list("known_splits", &known));
    FUSEDREC_TRY(ReadSplits("splits", splits, collective_->size(), &call->splits));
    FUSEDREC_TRY(ReadSplits("known_splits", known, collective_->size(), &expected));
    if (splits.size() != rows.size() || (known.size() != rows.size() && (known.size() > 0 || rows.size() > 1))) {
      return Invalid("splits and known_splits must be those of ", rows.size(), " tensors, got ", splits.size(), " and ",
                     known.size(), ". Only a single tensor may have unknown splits.");
    }
    for (int t = 0; t < rows.size(); ++t) {
      const int64_t self = collective_->index;
      FUSEDREC_TRY(RequireSplits(rows[t], splits[t], collective_->size()));
      if (known.size() > 0 && expected[t][self] != call->splits[t][self]) {
        return Invalid("known_splits must have ", call->splits[t][self], " rows of this rank, as splits, got ",
                       expected[t][self], ".", kEqualRanks);
      }
    }
    return Start(ctx, rows, expected, call);
  }

  // Sends the blocks of `rows`, and posts the receives. expected: rows from each rank; empty: they are not known.
  absl::Status Start(OpKernelContext* ctx, const OpInputList& rows, const Splits& expected, AllToAllCall* call) const {
    const std::vector<RowForm> forms = FormsOf(rows);
    const bool known = !expected.empty();
    const Collective& collective = *collective_;
    FUSEDREC_TRY(call->blocks.Set(ctx, {rows.begin(), rows.end()}, forms, call->splits));
    {
      std::lock_guard<std::mutex> lock(collective_->mutex);
      FUSEDREC_TRY(RunningCall::RequireNone(collective));
      if (collective.posted != nullptr) {
        FUSEDREC_TRY(collective.posted->RequireSame(forms, expected));
      } else if (known) {
        FUSEDREC_TRY(RowsReceive::Post(ctx, collective, collective.begun, forms, expected, &collective_->posted));
      } else if (collective.next_splits == nullptr) {
        collective_->next_splits = SplitsReceive::Post(collective, collective.begun);
      }
      call->running.Begin(collective_);
      call->receive = std::move(collective_->posted);
      call->received_splits = std::move(collective_->next_splits);
    }
    const uint64_t number = call->running.number();
    if (!known) {
      call->sent_splits = Mesh::OfProcess()->Buffer(call->splits[0].data(), collective.size() * sizeof(int32_t));
      collective.ForOthers([&](int i) {
        call->sent_splits->send(collective.ranks[i], collective.Slot(kSplits, number), i * sizeof(int32_t),
                                sizeof(int32_t));
      });
    }
    const Blocks& blocks = call->blocks;
    collective.ForOthers([&](int i) {
      blocks.CopySmall(i, /*to_message=*/true);
      blocks.ForMessages(i, [&](UnboundBuffer* buffer, int part, size_t offset, size_t bytes) {
        buffer->send(collective.ranks[i], collective.Slot(part, number), offset, bytes);
      });
    });
    if (call->receive) call->receive->blocks().CopyOwn(blocks, collective.index);
    return absl::OkStatus();
  }

  absl::Status Finish(OpKernelContext* ctx, AllToAllCall* call) const override {
    if (call->sent_splits) {
      SplitsReceive& received = *call->received_splits;
      collective_->ForOthers([&](int) { received.buffer->waitRecv(); });
      received.splits[collective_->index] = call->splits[0][collective_->index];
      OpInputList rows;
      FUSEDREC_TRY(ctx->input_list("rows", &rows));
      FUSEDREC_TRY(RowsReceive::Post(ctx, *collective_, call->running.number(), FormsOf(rows), {received.splits},
                                     &call->receive));
      call->receive->blocks().CopyOwn(call->blocks, collective_->index);
      collective_->ForOthers([&](int) { call->sent_splits->waitSend(); });
      auto next = SplitsReceive::Post(*collective_, call->running.number() + 1);
      std::lock_guard<std::mutex> lock(collective_->mutex);
      collective_->next_splits = std::move(next);
    }
    call->receive->Wait(*collective_);
    collective_->ForOthers([&](int i) {
      call->blocks.ForMessages(i, [](UnboundBuffer* buffer, int, size_t, size_t) { buffer->waitSend(); });
    });
    return call->receive->SetOutputs(ctx);
  }
};

REGISTER_KERNEL_BUILDER(Name("Fusedrec>ExchangeExpect").Device(tensorflow::DEVICE_CPU), ExchangeExpectOp);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>ExchangeAllToAll").Device(tensorflow::DEVICE_CPU), ExchangeAllToAllOp);

}  // namespace
}  // namespace fusedrec
