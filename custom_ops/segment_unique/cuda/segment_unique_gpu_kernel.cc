#include "common/gpu_kernel_util.h"
#include "segment_unique/cuda/segment_unique_cuda.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Waits once, for unique_splits: U is the size of an output.
class SegmentUniqueGpuOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &ids = ctx->input(0), &splits = ctx->input(1);
    const int64_t num_ids = ids.NumElements(), segments = splits.NumElements() - 1;
    OP_REQUIRES_OK(ctx, RequireRank("ids", ids, 1));
    OP_REQUIRES_OK(ctx, RequireRank("segment_splits", splits, 1));
    OP_REQUIRES_OK(ctx, RequireSplits("segment_splits", In<int64_t>(splits), num_ids));
    OP_REQUIRES_OK(ctx, RequireSize("the number of ids", num_ids));
    OP_REQUIRES(ctx, segments <= kSegmentUniqueCudaMaxSegments,
                absl::InvalidArgumentError(absl::StrCat("segment_splits must have at most ",
                                                        kSegmentUniqueCudaMaxSegments, " segments on a GPU, got ",
                                                        segments, ". Fuse fewer tables into one group.")));
    Tensor unique_ids, device_splits, scratch;
    Tensor *unique_splits, *inverse;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT64, ids.shape(), &unique_ids));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT64, splits.shape(), &device_splits));
    OP_REQUIRES_OK(ctx, AllocateScratch(ctx, fusedrec_segment_unique_scratch_bytes(num_ids, segments), &scratch));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, splits.shape(), &unique_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, ids.shape(), &inverse));
    OP_REQUIRES_OK(ctx, CudaStatus("segment_unique",
                                   fusedrec_segment_unique(In<int64_t>(ids).data(), In<int64_t>(splits).data(), num_ids,
                                                           segments, scratch.data(), Out<int64_t>(&unique_ids).data(),
                                                           Out<int64_t>(&device_splits).data(),
                                                           Out<int32_t>(inverse).data(), StreamOf(ctx))));
    OP_REQUIRES_OK(ctx, CudaStatus("copy of unique_splits",
                                   fusedrec_copy_to_host(unique_splits->data(), device_splits.data(),
                                                         splits.NumElements() * sizeof(int64_t), StreamOf(ctx))));
    ctx->set_output(0, unique_ids.Slice(0, Out<int64_t>(unique_splits).back()));
  }
};

REGISTER_KERNEL_BUILDER(
    Name("Fusedrec>SegmentUnique").Device(DEVICE_GPU).HostMemory("segment_splits").HostMemory("unique_splits"),
    SegmentUniqueGpuOp);

}  // namespace fusedrec
