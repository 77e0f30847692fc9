#include "join_messages/join_messages.h"

#include <string>
#include <vector>

#include "common/bucket.h"
#include "common/kernel_util.h"
#include "common/limits.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class JoinMessagesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OpInputList entries, splits;
    OP_REQUIRES_OK(ctx, ctx->input_list("messages", &entries));
    OP_REQUIRES_OK(ctx, ctx->input_list("splits", &splits));
    std::vector<MessageView> messages;
    for (int i = 0; i < entries.size(); ++i) {
      OP_REQUIRES_OK(ctx, RequireRank(absl::StrCat("messages[", i, "]").c_str(), entries[i], 1));
      OP_REQUIRES_OK(ctx, RequireRank(absl::StrCat("splits[", i, "]").c_str(), splits[i], 1));
      messages.push_back({In<int64_t>(entries[i]), In<int32_t>(splits[i])});
    }
    OP_REQUIRES_OK(ctx, CheckBlocks(messages));
    int64_t total = 0;
    for (const MessageView& message : messages) {
      for (const int32_t count : message.splits) total += count;
    }
    OP_REQUIRES_OK(ctx, RequireIn("the size of the joined message", total, 0, kMostPositions,
                                  "smaller batches, or fewer lookups in a step."));

    Tensor *joined, *joined_splits;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({BucketedSize(total)}), &joined));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, splits[0].shape(), &joined_splits));
    JoinMessages(messages, Out<int64_t>(joined), Out<int32_t>(joined_splits));
  }
};

class SplitMessagesOp : public OpKernel {
 public:
  explicit SplitMessagesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int64_t messages;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_messages", &messages));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("segments", &segments_));
    OP_REQUIRES(ctx, static_cast<int64_t>(segments_.size()) == messages,
                absl::InvalidArgumentError(absl::StrCat("segments must have one entry for each of the ", messages,
                                                        " messages, got ", segments_.size(), ".")));
    for (const int64_t count : segments_) {
      OP_REQUIRES_OK(ctx, RequireIn("segments", count, 1, kMostSegments, "the number of tables of each lookup."));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("message", message, 1));
    OP_REQUIRES_OK(ctx, RequireRank("splits", splits, 1));
    const MessageView joined{In<int64_t>(message), In<int32_t>(splits)};
    const size_t ranks = joined.splits.size();
    std::vector<int32_t> lengths(segments_.size() * ranks);
    OP_REQUIRES_OK(ctx, ReadLengths(joined, segments_, absl::MakeSpan(lengths)));

    OpOutputList part_tensors, length_tensors;
    OP_REQUIRES_OK(ctx, ctx->output_list("messages", &part_tensors));
    OP_REQUIRES_OK(ctx, ctx->output_list("lengths", &length_tensors));
    std::vector<absl::Span<int64_t>> parts;
    for (size_t i = 0; i < segments_.size(); ++i) {
      const int32_t* of_part = lengths.data() + i * ranks;
      int64_t size = 0;
      for (size_t r = 0; r < ranks; ++r) size += of_part[r];
      Tensor *part, *length;
      OP_REQUIRES_OK(ctx, part_tensors.allocate(i, TensorShape({size}), &part));
      OP_REQUIRES_OK(ctx, length_tensors.allocate(i, splits.shape(), &length));
      std::copy(of_part, of_part + ranks, Out<int32_t>(length).begin());
      parts.push_back(Out<int64_t>(part));
    }
    SplitMessages(joined, lengths, parts);
  }

 private:
  std::vector<int64_t> segments_;
};

REGISTER_KERNEL_BUILDER(Name("Fusedrec>JoinMessages").Device(DEVICE_CPU), JoinMessagesOp);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>SplitMessages").Device(DEVICE_CPU), SplitMessagesOp);
// On a GPU in host memory: the headers decide on sizes, and the ids of a step are small beside its rows.
REGISTER_KERNEL_BUILDER(Name("Fusedrec>JoinMessages")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("messages")
                            .HostMemory("splits")
                            .HostMemory("joined")
                            .HostMemory("joined_splits"),
                        JoinMessagesOp);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>SplitMessages")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("message")
                            .HostMemory("splits")
                            .HostMemory("messages")
                            .HostMemory("lengths"),
                        SplitMessagesOp);

}  // namespace fusedrec
