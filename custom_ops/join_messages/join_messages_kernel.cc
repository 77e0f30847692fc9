#include <vector>

#include "join_messages/join_messages_base.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class JoinMessagesOp : public JoinMessagesBase {
 public:
  using JoinMessagesBase::JoinMessagesBase;

  void Compute(OpKernelContext* ctx) override {
    std::vector<MessageView> messages;
    Tensor* joined;
    OP_REQUIRES_OK(ctx, Prepare(ctx, &messages, &joined));
    JoinMessages(messages, Out<int64_t>(joined));
  }
};

class SplitMessagesOp : public SplitMessagesBase {
 public:
  using SplitMessagesBase::SplitMessagesBase;

  void Compute(OpKernelContext* ctx) override {
    MessageView joined;
    OP_REQUIRES_OK(ctx, Read(ctx, &joined));
    std::vector<int32_t> lengths(segments().size() * joined.splits.size());
    OP_REQUIRES_OK(ctx, ReadLengths(joined, segments(), absl::MakeSpan(lengths)));
    std::vector<absl::Span<int64_t>> parts;
    OP_REQUIRES_OK(ctx, Allocate(ctx, lengths, &parts));
    SplitMessages(joined, lengths, parts);
  }
};

REGISTER_KERNEL_BUILDER(Name("Fusedrec>JoinMessages").Device(DEVICE_CPU), JoinMessagesOp);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>SplitMessages").Device(DEVICE_CPU), SplitMessagesOp);

}  // namespace fusedrec
