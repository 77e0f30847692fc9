#include "common/kernel_util.h"
#include "segment_unique/segment_unique.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class SegmentUniqueOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& ids = ctx->input(0);
    const Tensor& splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("ids", ids, 1));
    OP_REQUIRES_OK(ctx, RequireRank("segment_splits", splits, 1));
    OP_REQUIRES_OK(ctx, RequireSplits("segment_splits", In<int64_t>(splits), ids.NumElements()));
    OP_REQUIRES(ctx, ids.NumElements() <= kSegmentUniqueMaxIds,
                absl::InvalidArgumentError(absl::StrCat("ids must hold at most ", kSegmentUniqueMaxIds, " ids, got ",
                                                        ids.NumElements(), ". Use smaller batches.")));

    Tensor scratch;  // U is known only after the work, so unique ids are first written at full length
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT64, ids.shape(), &scratch));
    Tensor *unique_splits, *inverse;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, splits.shape(), &unique_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, ids.shape(), &inverse));

    const int64_t num_unique =
        SegmentUnique(In<int64_t>(ids), In<int64_t>(splits), CpuPool(ctx), Out<int64_t>(&scratch),
                      Out<int64_t>(unique_splits), Out<int32_t>(inverse));
    ctx->set_output(0, scratch.Slice(0, num_unique));
  }
};

REGISTER_KERNEL_BUILDER(Name("Fusedrec>SegmentUnique").Device(DEVICE_CPU), SegmentUniqueOp);

}  // namespace fusedrec
