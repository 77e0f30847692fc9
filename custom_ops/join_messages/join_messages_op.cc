#include "common/bucket.h"
#include "common/gpu_kernel_util.h"
#include "common/shapes.h"
#include "join_messages/join_messages.h"
#include "join_messages/join_messages_cuda.h"
#include "rank_partition/rank_partition.h"

namespace fusedrec {

REGISTER_OP("Fusedrec>JoinMessages")
    .Input("messages: num_messages * int64").Input("splits: num_messages * int32")
    .Output("joined: int64").Output("joined_splits: int32")
    .Attr("num_messages: int >= 1")
    .SetShapeFn(Shapes("num_messages*[p] num_messages*[r] -> [?] [r]"))
    .Doc("Joins the messages of several lookups into one.");

REGISTER_OP("Fusedrec>SplitMessages")
    .Input("message: int64").Input("splits: int32")
    .Output("messages: num_messages * int64").Output("lengths: num_messages * int32")
    .Attr("num_messages: int >= 1").Attr("segments: list(int)")
    .SetShapeFn(Shapes("[p] [r] -> num_messages*[?] num_messages*[r]"))
    .Doc("Splits a received message into the messages that JoinMessages joined.");

// Splits and lengths are in host memory.
template <On kOn>
class JoinMessagesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::vector<MessageView> messages;
    OpInputList entries, splits;
    OP_REQUIRES_OK(ctx, ReadVectors(ctx, "messages", &entries));
    OP_REQUIRES_OK(ctx, ReadVectors(ctx, "splits", &splits));
    for (int i = 0; i < entries.size(); ++i) messages.push_back({In<int64_t>(entries[i]), In<int32_t>(splits[i])});
    OP_REQUIRES_OK(ctx, CheckBlocks(messages));
    const int64_t padded = BucketedSize(EntriesOf(messages));
    OP_REQUIRES_OK(ctx, RequireIn("the size of the joined message, padded,", padded, 0, kMostPositions,
                                  "smaller batches, or fewer lookups in a step."));
    Tensor *joined, *joined_splits;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({padded}), &joined));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, splits[0].shape(), &joined_splits));
    JoinSplits(messages, Out<int32_t>(joined_splits));
    if constexpr (kOn == On::kGpu) {
      Gpu gpu(ctx);
      std::vector<const int64_t*> blocks;
      std::vector<const int32_t*> sizes;
      for (const MessageView& message : messages) {
        blocks.push_back(message.entries.data());
        sizes.push_back(message.splits.data());
      }
      OP_REQUIRES_OK(
          ctx, gpu.Check("join_messages",
                   fusedrec_join_messages(blocks.data(), sizes.data(), messages.size(), joined_splits->NumElements(),
                       &gpu.memory, Out<int64_t>(joined).data(), joined->NumElements(), gpu.stream)));
    } else {
      JoinMessages(messages, Out<int64_t>(joined));
    }
  }
};

template <On kOn>
class SplitMessagesOp : public OpKernel {
 public:
  explicit SplitMessagesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int64_t messages;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_messages", &messages));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("segments", &segments_));
    OP_REQUIRES(ctx, static_cast<int64_t>(segments_.size()) == messages,
        Invalid("segments must have one entry for each of the ", messages, " messages, got ", segments_.size(), "."));
    for (const int64_t count : segments_) {
      OP_REQUIRES_OK(ctx, RequireIn("segments", count, 1, kMostSegments, "the number of tables of each lookup."));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("message", message, 1));
    OP_REQUIRES_OK(ctx, RequireRank("splits", splits, 1));
    OP_REQUIRES_OK(ctx, RequireSize("the size of message", message.NumElements()));
    const MessageView joined{In<int64_t>(message), In<int32_t>(splits)};
    OP_REQUIRES_OK(ctx, CheckReceivedSplits(joined.entries.size(), joined.splits, 0, "splits"));
    std::vector<int32_t> lengths(segments_.size() * joined.splits.size());
    std::vector<absl::Span<int64_t>> parts;
    if constexpr (kOn == On::kGpu) {
      Gpu gpu(ctx);
      OP_REQUIRES_OK(ctx, ReadLengthsOnGpu(gpu, message, joined, absl::MakeSpan(lengths)));
      OP_REQUIRES_OK(ctx, Allocate(ctx, lengths, &parts));
      std::vector<int64_t*> to;
      for (const absl::Span<int64_t> part : parts) to.push_back(part.data());
      OP_REQUIRES_OK(ctx, gpu.Check("split_messages",
                                    fusedrec_split_messages(joined.entries.data(), lengths.data(), segments_.size(),
                                                            joined.splits.size(), &gpu.memory, to.data(), gpu.stream)));
    } else {
      OP_REQUIRES_OK(ctx, ReadLengths(joined, segments_, absl::MakeSpan(lengths)));
      OP_REQUIRES_OK(ctx, Allocate(ctx, lengths, &parts));
      SplitMessages(joined, lengths, parts);
    }
  }

 private:
  // Waits once. The check of the CPU looks for a header that does not agree; the message comes to the host only for that.
  absl::Status ReadLengthsOnGpu(const Gpu& gpu, const Tensor& message, const MessageView& joined,
                                absl::Span<int32_t> lengths) const {
    const int answer = fusedrec_message_lengths(joined.entries.data(), joined.splits.data(), segments_.data(),
        segments_.size(), joined.splits.size(), &gpu.memory, lengths.data(), gpu.stream);
    if (answer == kCudaInvalidValue) {
      std::vector<int64_t> entries;
      FUSEDREC_TRY(gpu.CopyToHost(message, &entries));
      FUSEDREC_TRY(ReadLengths({entries, joined.splits}, segments_, lengths));
    }
    return gpu.Check("message_lengths", answer);
  }

  // lengths: see ReadLengths. Writes them to their outputs, too.
  absl::Status Allocate(OpKernelContext* ctx, absl::Span<const int32_t> lengths,
                        std::vector<absl::Span<int64_t>>* parts) const {
    const TensorShape& ranks = ctx->input(1).shape();
    OpOutputList part_tensors, length_tensors;
    FUSEDREC_TRY(ctx->output_list("messages", &part_tensors));
    FUSEDREC_TRY(ctx->output_list("lengths", &length_tensors));
    for (size_t i = 0; i < segments_.size(); ++i) {
      const absl::Span<const int32_t> of_part = lengths.subspan(i * ranks.num_elements(), ranks.num_elements());
      int64_t size = 0;
      for (const int32_t count : of_part) size += count;
      Tensor *part, *length;
      FUSEDREC_TRY(part_tensors.allocate(i, TensorShape({size}), &part));
      FUSEDREC_TRY(length_tensors.allocate(i, ranks, &length));
      std::copy(of_part.begin(), of_part.end(), Out<int32_t>(length).begin());
      parts->push_back(Out<int64_t>(part));
    }
    return absl::OkStatus();
  }

  std::vector<int64_t> segments_;
};

FUSEDREC_KERNEL_ON_BOTH("JoinMessages", JoinMessagesOp, .HostMemory("splits").HostMemory("joined_splits"));
FUSEDREC_KERNEL_ON_BOTH("SplitMessages", SplitMessagesOp, .HostMemory("splits").HostMemory("lengths"));

}  // namespace fusedrec
