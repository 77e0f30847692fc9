#include "common/kernel_util.h"
#include "common/shapes.h"
#include "window_rows/window_rows.h"

namespace fusedrec {

REGISTER_OP("Fusedrec>WindowUnique")
    .Input("ids: num_pieces * int64").Input("id_splits: num_pieces * int64")
    .Output("new_ids: num_pieces * int64").Output("new_splits: num_pieces * int64")
    .Output("numbers: num_pieces * int32").Output("last: int32")
    .Attr("num_pieces: int >= 1")
    .SetShapeFn(Shapes("num_pieces*[u] num_pieces*[s] -> num_pieces*[?] num_pieces*[s] num_pieces*[u] [?]"))
    .Doc("Finds the ids of each piece of a batch that no earlier piece has, and the last piece of each id.");

REGISTER_OP("Fusedrec>WindowRoute")
    .Input("messages: num_pieces * int64").Input("splits: num_pieces * int32").Input("restore: num_pieces * int32")
    .Input("numbers: num_pieces * int32").Input("last: int32")
    .Output("rows: num_pieces * int32").Output("marks: int64").Output("marks_splits: int32")
    .Output("term_index: num_pieces * int32").Output("term_splits: num_pieces * int64")
    .Output("gradient_splits: num_pieces * int32")
    .Attr("num_pieces: int >= 1").Attr("num_segments: int >= 1")
    .SetShapeFn(Shapes("num_pieces*[p] num_pieces*[r] num_pieces*[n] num_pieces*[u] [v] -> "
                       "num_pieces*[u] [?] [r] num_pieces*[?] num_pieces*[?] num_pieces*[r]"))
    .Doc("On the asking rank: the number of each id's row, and the gradients that leave with each piece.");

REGISTER_OP("Fusedrec>WindowGradients")
    .Input("messages: num_pieces * int64").Input("splits: num_pieces * int32").Input("marks: int64")
    .Input("marks_splits: int32")
    .Output("trained: num_pieces * int64").Output("trained_splits: num_pieces * int32")
    .Output("rows: num_pieces * int32")
    .Attr("num_pieces: int >= 1").Attr("num_segments: int >= 1")
    .SetShapeFn(Shapes("num_pieces*[p] num_pieces*[r] [m] [r] -> num_pieces*[?] num_pieces*[r] num_pieces*[?]"))
    .Doc("On the owner rank: the gradients that arrive with each piece.");

namespace {

// *ids: number of the ids of all messages.
absl::Status ReadMessages(OpKernelContext* ctx, int64_t segments, std::vector<MessageView>* messages, int64_t* ids) {
  OpInputList entries, splits;
  FUSEDREC_TRY(ReadVectors(ctx, "messages", &entries));
  FUSEDREC_TRY(ReadVectors(ctx, "splits", &splits));
  for (int i = 0; i < entries.size(); ++i) messages->push_back({In<int64_t>(entries[i]), In<int32_t>(splits[i])});
  return CheckWindow(*messages, segments, ids);
}

}  // namespace

class WindowUniqueOp : public OpKernel {
 public:
  explicit WindowUniqueOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int64_t pieces;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_pieces", &pieces));
    OP_REQUIRES_OK(ctx, RequireIn("num_pieces", pieces, 1, kMostPieces, "fewer micro-batches."));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList ids, splits;
    OP_REQUIRES_OK(ctx, ReadVectors(ctx, "ids", &ids));
    OP_REQUIRES_OK(ctx, ReadVectors(ctx, "id_splits", &splits));
    OpOutputList new_ids, new_splits, numbers;
    OP_REQUIRES_OK(ctx, ctx->output_list("new_ids", &new_ids));
    OP_REQUIRES_OK(ctx, ctx->output_list("new_splits", &new_splits));
    OP_REQUIRES_OK(ctx, ctx->output_list("numbers", &numbers));
    std::vector<Tensor> found(ids.size());  // how many ids are new is known only after the work
    std::vector<PieceIds> pieces;
    int64_t total = 0;
    for (int i = 0; i < ids.size(); ++i) {
      const absl::Span<const int64_t> bounds = In<int64_t>(splits[i]);
      OP_REQUIRES_OK(ctx, RequireSplits(absl::StrCat("id_splits[", i, "]").c_str(), bounds, ids[i].NumElements()));
      OP_REQUIRES(ctx, splits[i].NumElements() == splits[0].NumElements() && splits[i].NumElements() > 1,
          Invalid("id_splits[", i, "] must bound one segment or more, as many as id_splits[0], got ",
              splits[i].NumElements() - 1, " and ", splits[0].NumElements() - 1,
              ". Pass the splits of segment_unique for the same tables."));
      Tensor *of_new, *number;
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT64, ids[i].shape(), &found[i]));
      OP_REQUIRES_OK(ctx, new_splits.allocate(i, splits[i].shape(), &of_new));
      OP_REQUIRES_OK(ctx, numbers.allocate(i, ids[i].shape(), &number));
      pieces.push_back({In<int64_t>(ids[i]), bounds, Out<int64_t>(&found[i]), Out<int64_t>(of_new),
                        Out<int32_t>(number)});
      total += ids[i].NumElements();
    }
    OP_REQUIRES_OK(ctx, RequireIn("the number of ids in pieces", total, 0, kMostPositions, "smaller batches."));
    Tensor last;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT32, TensorShape({total}), &last));
    const int64_t distinct = WindowUnique(pieces, CpuPool(ctx), Out<int32_t>(&last));
    for (int i = 0; i < ids.size(); ++i) new_ids.set(i, found[i].Slice(0, pieces[i].new_splits.back()));
    ctx->set_output(3 * ids.size(), last.Slice(0, distinct));
  }
};

class RoutingOp : public OpKernel {
 public:
  explicit RoutingOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_segments", &segments_));
    OP_REQUIRES_OK(ctx, RequireIn("num_segments", segments_, 1, kMostSegments, "the number of tables."));
  }

 protected:
  int64_t segments_;
};

class WindowRouteOp : public RoutingOp {
 public:
  using RoutingOp::RoutingOp;

  void Compute(OpKernelContext* ctx) override {
    std::vector<MessageView> messages;
    int64_t ids;
    OP_REQUIRES_OK(ctx, ReadMessages(ctx, segments_, &messages, &ids));
    OpInputList restore, numbers;
    OP_REQUIRES_OK(ctx, ReadVectors(ctx, "restore", &restore));
    OP_REQUIRES_OK(ctx, ReadVectors(ctx, "numbers", &numbers));
    const int num_pieces = static_cast<int>(messages.size());
    const Tensor& last = ctx->input(4 * num_pieces);
    OP_REQUIRES_OK(ctx, RequireRank("last", last, 1));

    int64_t held = 0;
    std::vector<PieceRows> pieces;
    for (int i = 0; i < num_pieces; ++i) {
      Tensor* of_piece;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, numbers[i].shape(), &of_piece));
      pieces.push_back({In<int32_t>(restore[i]), In<int32_t>(numbers[i]), Out<int32_t>(of_piece)});
      held += numbers[i].NumElements();
    }
    OP_REQUIRES(ctx, last.NumElements() == ids,
        Invalid("last must have one entry for each of the ", ids, " ids of messages, got ", last.NumElements(),
            ". Pass the outputs of window_unique."));
    OP_REQUIRES_OK(ctx, RequireIn("the number of ids in numbers", held, 0, kMostPositions, "smaller batches."));
    std::vector<int32_t> last_row(ids);
    OP_REQUIRES_OK(ctx, NumberRows(messages, segments_, pieces, In<int32_t>(last), absl::MakeSpan(last_row)));

    const size_t peers = messages[0].splits.size();
    std::vector<int32_t> marks_splits(peers);
    OP_REQUIRES_OK(ctx, Give(ctx, num_pieces, PackMarks(messages, segments_, last_row, absl::MakeSpan(marks_splits))));
    OP_REQUIRES_OK(ctx, Give(ctx, num_pieces + 1, marks_splits));
    const std::vector<PieceGradients> gradients = OrderGradients(messages, segments_, last_row);
    const std::vector<PieceSums> sums = SumTerms(gradients, pieces, ids);
    for (int i = 0; i < num_pieces; ++i) {
      std::vector<int32_t> counts(peers, 0);
      for (size_t n = 0; n < gradients[i].counts.size(); ++n) counts[n / segments_] += gradients[i].counts[n];
      int output = num_pieces + 2 + i;
      OP_REQUIRES_OK(ctx, Give(ctx, output, sums[i].index));
      OP_REQUIRES_OK(ctx, Give(ctx, output += num_pieces, sums[i].splits));
      OP_REQUIRES_OK(ctx, Give(ctx, output += num_pieces, counts));
    }
  }
};

class WindowGradientsOp : public RoutingOp {
 public:
  using RoutingOp::RoutingOp;

  void Compute(OpKernelContext* ctx) override {
    std::vector<MessageView> messages;
    int64_t ids;
    OP_REQUIRES_OK(ctx, ReadMessages(ctx, segments_, &messages, &ids));
    const int num_pieces = static_cast<int>(messages.size());
    const Tensor &marks = ctx->input(2 * num_pieces), &marks_splits = ctx->input(2 * num_pieces + 1);
    OP_REQUIRES_OK(ctx, RequireRank("marks", marks, 1));
    OP_REQUIRES_OK(ctx, RequireRank("marks_splits", marks_splits, 1));
    std::vector<int32_t> last_row(ids);
    OP_REQUIRES_OK(ctx, ReadMarks(messages, segments_, {In<int64_t>(marks), In<int32_t>(marks_splits)},
                                  absl::MakeSpan(last_row)));
    const std::vector<PieceGradients> gradients = OrderGradients(messages, segments_, last_row);
    for (int i = 0; i < num_pieces; ++i) {
      const std::vector<int64_t>& counts = gradients[i].counts;
      std::vector<int64_t> message;
      std::vector<int32_t> splits;
      auto id = gradients[i].ids.begin();
      for (auto header = counts.begin(); header != counts.end(); header += segments_) {
        const size_t begin = message.size();
        message.insert(message.end(), header, header + segments_);
        for (auto count = header; count != header + segments_; id += *count++) {
          message.insert(message.end(), id, id + *count);
        }
        splits.push_back(static_cast<int32_t>(message.size() - begin));
      }
      OP_REQUIRES_OK(ctx, Give(ctx, i, message));
      OP_REQUIRES_OK(ctx, Give(ctx, num_pieces + i, splits));
      OP_REQUIRES_OK(ctx, Give(ctx, 2 * num_pieces + i, gradients[i].row));
    }
  }
};

// In host memory for models on a GPU as well: micro-batches share rows across ranks only, and their ids are in host memory
// there.
FUSEDREC_KERNEL_ON_HOST("WindowUnique", WindowUniqueOp,
                        .HostMemory("ids").HostMemory("id_splits").HostMemory("new_ids").HostMemory("new_splits")
                        .HostMemory("numbers").HostMemory("last"));
FUSEDREC_KERNEL_ON_HOST("WindowRoute", WindowRouteOp,
                        .HostMemory("messages").HostMemory("splits").HostMemory("restore").HostMemory("numbers")
                        .HostMemory("last").HostMemory("rows").HostMemory("marks").HostMemory("marks_splits")
                        .HostMemory("term_index").HostMemory("term_splits").HostMemory("gradient_splits"));
FUSEDREC_KERNEL_ON_HOST("WindowGradients", WindowGradientsOp,
                        .HostMemory("messages").HostMemory("splits").HostMemory("marks").HostMemory("marks_splits")
                        .HostMemory("trained").HostMemory("trained_splits").HostMemory("rows"));

}  // namespace fusedrec
