#include "common/gpu_kernel_util.h"
#include "common/shapes.h"
#include "segment_unique/segment_unique.h"
#include "segment_unique/segment_unique_cuda.h"

namespace fusedrec {

REGISTER_OP("Fusedrec>SegmentUnique")
    .Input("ids: int64").Input("segment_splits: int64")
    .Output("unique_ids: int64").Output("unique_splits: int64").Output("inverse: int32")
    .SetShapeFn(Shapes("[n] [s] -> [?] [s] [n]"))
    .Doc("Removes duplicate ids inside each segment (FusedRec, section 3, 'Embedding Deduplication').");

template <On kOn>
class SegmentUniqueOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &ids = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("ids", ids, 1));
    OP_REQUIRES_OK(ctx, RequireRank("segment_splits", splits, 1));
    OP_REQUIRES_OK(ctx, RequireSplits("segment_splits", In<int64_t>(splits), ids.NumElements()));
    OP_REQUIRES_OK(ctx, RequireSize("the number of ids", ids.NumElements()));
    OP_REQUIRES_OK(ctx, RequireIn("the size of segment_splits", splits.NumElements(), 1, kMostSegments + 1,
                                  "fewer tables."));
    Tensor unique_ids;  // U is known only after the work, so they are first written at full length
    Tensor *unique_splits, *inverse;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT64, ids.shape(), &unique_ids));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, splits.shape(), &unique_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, ids.shape(), &inverse));
    if constexpr (kOn == On::kGpu) {
      Gpu gpu(ctx);
      OP_REQUIRES_OK(
          ctx, gpu.Check("segment_unique",
                   fusedrec_segment_unique(In<int64_t>(ids).data(), In<int64_t>(splits).data(), ids.NumElements(),
                       splits.NumElements() - 1, &gpu.memory, Out<int64_t>(&unique_ids).data(),
                       Out<int64_t>(unique_splits).data(), Out<int32_t>(inverse).data(), gpu.stream)));
    } else {
      SegmentUnique(In<int64_t>(ids), In<int64_t>(splits), CpuPool(ctx), Out<int64_t>(&unique_ids),
                    Out<int64_t>(unique_splits), Out<int32_t>(inverse));
    }
    ctx->set_output(0, unique_ids.Slice(0, Out<int64_t>(unique_splits).back()));
  }
};

FUSEDREC_KERNEL_ON_BOTH("SegmentUnique", SegmentUniqueOp, .HostMemory("segment_splits").HostMemory("unique_splits"));

}  // namespace fusedrec
