#include <vector>

#include "common/gpu_kernel_util.h"
#include "join_messages/cuda/join_messages_cuda.h"
#include "join_messages/join_messages_base.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class JoinMessagesGpuOp : public JoinMessagesBase {
 public:
  using JoinMessagesBase::JoinMessagesBase;

  void Compute(OpKernelContext* ctx) override {
    std::vector<MessageView> messages;
    Tensor* joined;
    OP_REQUIRES_OK(ctx, Prepare(ctx, &messages, &joined));
    OP_REQUIRES_OK(ctx, RequireSize("the size of the joined message, padded,", joined->NumElements()));
    const int64_t count = messages.size(), ranks = messages[0].splits.size();
    Tensor scratch;
    OP_REQUIRES_OK(ctx, AllocateScratch(ctx, fusedrec_join_messages_scratch_bytes(count, ranks), &scratch));
    std::vector<const int64_t*> entries;
    std::vector<const int32_t*> splits;
    for (const MessageView& message : messages) {
      entries.push_back(message.entries.data());
      splits.push_back(message.splits.data());
    }
    OP_REQUIRES_OK(ctx, CudaStatus("join_messages",
                                   fusedrec_join_messages(entries.data(), splits.data(), count, ranks, scratch.data(),
                                                          Out<int64_t>(joined).data(), joined->NumElements(),
                                                          StreamOf(ctx))));
  }
};

// Waits once, for the lengths of the blocks.
class SplitMessagesGpuOp : public SplitMessagesBase {
 public:
  using SplitMessagesBase::SplitMessagesBase;

  void Compute(OpKernelContext* ctx) override {
    MessageView joined;
    OP_REQUIRES_OK(ctx, RequireSize("the size of message", ctx->input(0).NumElements()));
    OP_REQUIRES_OK(ctx, Read(ctx, &joined));
    const int64_t count = segments().size(), ranks = joined.splits.size();
    std::vector<int32_t> lengths(count * ranks);
    Tensor scratch, pieces;
    OP_REQUIRES_OK(ctx, AllocateScratch(ctx, fusedrec_message_lengths_scratch_bytes(count, ranks), &scratch));
    const int answer = fusedrec_message_lengths(joined.entries.data(), joined.splits.data(), segments().data(), count,
                                                ranks, scratch.data(), lengths.data(), StreamOf(ctx));
    OP_REQUIRES_OK(ctx, LengthsStatus(ctx, joined, answer));
    std::vector<absl::Span<int64_t>> parts;
    OP_REQUIRES_OK(ctx, Allocate(ctx, lengths, &parts));
    OP_REQUIRES_OK(ctx, AllocateScratch(ctx, fusedrec_split_messages_scratch_bytes(count, ranks), &pieces));
    std::vector<int64_t*> to;
    for (const absl::Span<int64_t> part : parts) to.push_back(part.data());
    OP_REQUIRES_OK(ctx, CudaStatus("split_messages",
                                   fusedrec_split_messages(joined.entries.data(), lengths.data(), count, ranks,
                                                           pieces.data(), to.data(), StreamOf(ctx))));
  }

 private:
  // The check of the CPU looks for the header that does not agree. The message comes to the host only for that.
  absl::Status LengthsStatus(OpKernelContext* ctx, const MessageView& joined, int answer) const {
    if (answer != kCudaInvalidValue) return CudaStatus("message_lengths", answer);
    std::vector<int64_t> entries(joined.entries.size());
    TF_RETURN_IF_ERROR(CudaStatus("copy of a message",
                                  fusedrec_copy_to_host(entries.data(), joined.entries.data(),
                                                        entries.size() * sizeof(int64_t), StreamOf(ctx))));
    std::vector<int32_t> lengths(segments().size() * joined.splits.size());
    TF_RETURN_IF_ERROR(ReadLengths({entries, joined.splits}, segments(), absl::MakeSpan(lengths)));
    return CudaStatus("message_lengths", answer);
  }
};

REGISTER_KERNEL_BUILDER(
    Name("Fusedrec>JoinMessages").Device(DEVICE_GPU).HostMemory("splits").HostMemory("joined_splits"),
    JoinMessagesGpuOp);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>SplitMessages").Device(DEVICE_GPU).HostMemory("splits").HostMemory("lengths"),
                        SplitMessagesGpuOp);

}  // namespace fusedrec
