// The common part of join_messages's kernels: they read inputs, and allocate outputs. Splits and lengths
// are in host memory. Entries of messages are not read here.
#pragma once

#include <algorithm>
#include <vector>

#include "common/bucket.h"
#include "common/kernel_util.h"
#include "common/limits.h"
#include "join_messages/join_messages.h"

namespace fusedrec {

class JoinMessagesBase : public tensorflow::OpKernel {
 public:
  using tensorflow::OpKernel::OpKernel;

 protected:
  // Reads and checks the messages, and writes joined_splits.
  absl::Status Prepare(tensorflow::OpKernelContext* ctx, std::vector<MessageView>* messages,
                       tensorflow::Tensor** joined) const {
    tensorflow::OpInputList entries, splits;
    TF_RETURN_IF_ERROR(ctx->input_list("messages", &entries));
    TF_RETURN_IF_ERROR(ctx->input_list("splits", &splits));
    for (int i = 0; i < entries.size(); ++i) {
      TF_RETURN_IF_ERROR(RequireRank(absl::StrCat("messages[", i, "]").c_str(), entries[i], 1));
      TF_RETURN_IF_ERROR(RequireRank(absl::StrCat("splits[", i, "]").c_str(), splits[i], 1));
      messages->push_back({In<int64_t>(entries[i]), In<int32_t>(splits[i])});
    }
    TF_RETURN_IF_ERROR(CheckBlocks(*messages));
    const int64_t total = EntriesOf(*messages);
    TF_RETURN_IF_ERROR(RequireIn("the size of the joined message", total, 0, kMostPositions,
                                 "smaller batches, or fewer lookups in a step."));
    tensorflow::Tensor* joined_splits;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, tensorflow::TensorShape({BucketedSize(total)}), joined));
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, splits[0].shape(), &joined_splits));
    JoinSplits(*messages, Out<int32_t>(joined_splits));
    return absl::OkStatus();
  }
};

class SplitMessagesBase : public tensorflow::OpKernel {
 public:
  explicit SplitMessagesBase(tensorflow::OpKernelConstruction* ctx) : tensorflow::OpKernel(ctx) {
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

 protected:
  absl::Status Read(tensorflow::OpKernelContext* ctx, MessageView* joined) const {
    TF_RETURN_IF_ERROR(RequireRank("message", ctx->input(0), 1));
    TF_RETURN_IF_ERROR(RequireRank("splits", ctx->input(1), 1));
    *joined = {In<int64_t>(ctx->input(0)), In<int32_t>(ctx->input(1))};
    return CheckJoinedBlocks(*joined);
  }

  // lengths: see ReadLengths. Writes them to their outputs, too.
  absl::Status Allocate(tensorflow::OpKernelContext* ctx, absl::Span<const int32_t> lengths,
                        std::vector<absl::Span<int64_t>>* parts) const {
    const tensorflow::TensorShape& ranks = ctx->input(1).shape();
    tensorflow::OpOutputList part_tensors, length_tensors;
    TF_RETURN_IF_ERROR(ctx->output_list("messages", &part_tensors));
    TF_RETURN_IF_ERROR(ctx->output_list("lengths", &length_tensors));
    for (size_t i = 0; i < segments_.size(); ++i) {
      const absl::Span<const int32_t> of_part = lengths.subspan(i * ranks.num_elements(), ranks.num_elements());
      int64_t size = 0;
      for (const int32_t count : of_part) size += count;
      tensorflow::Tensor *part, *length;
      TF_RETURN_IF_ERROR(part_tensors.allocate(i, tensorflow::TensorShape({size}), &part));
      TF_RETURN_IF_ERROR(length_tensors.allocate(i, ranks, &length));
      std::copy(of_part.begin(), of_part.end(), Out<int32_t>(length).begin());
      parts->push_back(Out<int64_t>(part));
    }
    return absl::OkStatus();
  }

  const std::vector<int64_t>& segments() const { return segments_; }

 private:
  std::vector<int64_t> segments_;
};

}  // namespace fusedrec
