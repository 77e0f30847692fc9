#include <string>
#include <vector>

#include "common/bucket.h"
#include "common/gpu_kernel_util.h"
#include "common/limits.h"
#include "rank_partition/cuda/rank_partition_cuda.h"
#include "rank_partition/rank_partition.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Waits once, for the counts: the host calls the collective, so it must know the sizes.
class RankPartitionGpuOp : public OpKernel {
 public:
  explicit RankPartitionGpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string owner;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_ranks", &num_ranks_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("owner", &owner));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("id_bits", &id_bits_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("segment_names", &segment_names_));
    tfra_owner_ = owner == "tfra";
    OP_REQUIRES_OK(ctx, RequireIn("num_ranks (on a GPU)", num_ranks_, 1, kRankPartitionCudaMaxRanks,
                                  "the number of ranks."));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &ids = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("unique_ids", ids, 1));
    OP_REQUIRES_OK(ctx, RequireRank("unique_splits", splits, 1));
    OP_REQUIRES_OK(ctx, RequireSplits("unique_splits", In<int64_t>(splits), ids.NumElements()));
    const int64_t num_ids = ids.NumElements(), segments = splits.NumElements() - 1;
    OP_REQUIRES_OK(ctx, RequireIn("the size of unique_splits", segments + 1, 1, kMostSegments + 1, "fewer tables."));
    const int64_t padded = BucketedSize(num_ids + num_ranks_ * segments);
    OP_REQUIRES_OK(ctx, RequireSize("the size of the message", padded));
    Tensor scratch;
    Tensor *message, *send_splits, *id_splits, *restore;
    OP_REQUIRES_OK(ctx, AllocateScratch(ctx, fusedrec_rank_partition_scratch_bytes(num_ids, segments, num_ranks_),
                                        &scratch));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({padded}), &message));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({num_ranks_}), &send_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({num_ranks_}), &id_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(3, ids.shape(), &restore));
    std::vector<int32_t> counts(num_ranks_ + 1);
    OP_REQUIRES_OK(ctx, CudaStatus("rank_partition",
                                   fusedrec_rank_partition(In<int64_t>(ids).data(), In<int64_t>(splits).data(), num_ids,
                                                           segments, num_ranks_, tfra_owner_, id_bits_, scratch.data(),
                                                           Out<int64_t>(message).data(), padded, counts.data(),
                                                           Out<int32_t>(restore).data(), StreamOf(ctx))));
    OP_REQUIRES_OK(ctx, RequireIdsFit(ctx, counts[num_ranks_]));
    for (int64_t r = 0; r < num_ranks_; ++r) {
      Out<int32_t>(id_splits)[r] = counts[r];
      Out<int32_t>(send_splits)[r] = counts[r] + static_cast<int32_t>(segments);
    }
  }

 private:
  // misfit: position of the first id that does not fit, or -1.
  absl::Status RequireIdsFit(OpKernelContext* ctx, int32_t misfit) const {
    if (misfit < 0) return absl::OkStatus();
    int64_t id;
    TF_RETURN_IF_ERROR(CudaStatus("copy of an id", fusedrec_copy_to_host(&id, In<int64_t>(ctx->input(0)).data() + misfit,
                                                                         sizeof(id), StreamOf(ctx))));
    const absl::Span<const int64_t> splits = In<int64_t>(ctx->input(1));
    size_t s = 0;
    while (splits[s + 1] <= misfit) ++s;
    const std::string table =
        s < segment_names_.size() ? absl::StrCat("table '", segment_names_[s], "'") : absl::StrCat("segment ", s);
    return absl::InvalidArgumentError(absl::StrCat(
        "id ", id, " of ", table, " does not fit the ", id_bits_, " bits that a merged key leaves for ids: ids must lie ",
        "in [0, 2^", id_bits_, "). Use key_encoding='hash', or hash the ids into that range."));
  }

  int64_t num_ranks_, id_bits_;
  bool tfra_owner_;
  std::vector<std::string> segment_names_;
};

// Waits once, for the headers.
class UnpackMessageGpuOp : public OpKernel {
 public:
  explicit UnpackMessageGpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_segments", &num_segments_));
    OP_REQUIRES_OK(ctx, RequireIn("num_segments", num_segments_, 1, kMostSegments, "the number of tables."));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("message", message, 1));
    OP_REQUIRES_OK(ctx, RequireRank("received_splits", splits, 1));
    OP_REQUIRES_OK(ctx, RequireSize("the size of the message", message.NumElements()));
    const int64_t ranks = splits.NumElements(), num_ids = message.NumElements() - ranks * num_segments_;
    OP_REQUIRES_OK(ctx, CheckReceivedSplits(message.NumElements(), In<int32_t>(splits), num_segments_));
    Tensor scratch;
    OP_REQUIRES_OK(ctx, AllocateScratch(ctx, fusedrec_unpack_message_scratch_bytes(num_segments_, ranks), &scratch));
    std::vector<int64_t> headers(ranks * num_segments_);
    OP_REQUIRES_OK(ctx, CudaStatus("message_headers",
                                   fusedrec_message_headers(In<int64_t>(message).data(), In<int32_t>(splits).data(),
                                                            num_segments_, ranks, scratch.data(), headers.data(),
                                                            StreamOf(ctx))));
    for (int64_t r = 0; r < ranks; ++r) {
      OP_REQUIRES_OK(ctx, CheckHeader(r, {&headers[r * num_segments_], static_cast<size_t>(num_segments_)},
                                      In<int32_t>(splits)[r] - num_segments_));
    }

    Tensor *ids, *segment_splits, *position, *id_splits;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({num_ids}), &ids));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({num_segments_ + 1}), &segment_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({num_ids}), &position));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(3, splits.shape(), &id_splits));
    OP_REQUIRES_OK(ctx, CudaStatus("unpack_message",
                                   fusedrec_unpack_message(In<int64_t>(message).data(), headers.data(), num_segments_,
                                                           ranks, scratch.data(), Out<int64_t>(ids).data(),
                                                           Out<int64_t>(segment_splits).data(),
                                                           Out<int32_t>(position).data(),
                                                           Out<int32_t>(id_splits).data(), StreamOf(ctx))));
  }

 private:
  int64_t num_segments_;
};

REGISTER_KERNEL_BUILDER(Name("Fusedrec>RankPartition")
                            .Device(DEVICE_GPU)
                            .HostMemory("unique_splits")
                            .HostMemory("send_splits")
                            .HostMemory("id_splits"),
                        RankPartitionGpuOp);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>UnpackMessage")
                            .Device(DEVICE_GPU)
                            .HostMemory("received_splits")
                            .HostMemory("segment_splits")
                            .HostMemory("id_splits"),
                        UnpackMessageGpuOp);

}  // namespace fusedrec
