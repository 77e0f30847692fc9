#include "common/gpu_kernel_util.h"
#include "initial_rows/cuda/initial_rows_cuda.h"
#include "initial_rows/initial_rows_base.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

template <typename T>
class InitialRowsGpuOp : public InitialRowsBase {
 public:
  using InitialRowsBase::InitialRowsBase;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &rows = ctx->input(0), &exists = ctx->input(1), &ids = ctx->input(2), &splits = ctx->input(3);
    OP_REQUIRES_OK(ctx, RequireSize("the number of ids", ids.NumElements()));
    Tensor scratch;
    Tensor* out;
    OP_REQUIRES_OK(ctx, Prepare(ctx, &out));
    OP_REQUIRES_OK(ctx, RequireSize("the columns of rows", rows.dim_size(1)));
    OP_REQUIRES_OK(ctx, AllocateScratch(ctx, fusedrec_initial_rows_scratch_bytes(seeds_.size()), &scratch));
    OP_REQUIRES_OK(ctx, CudaStatus("initial_rows",
                                   fusedrec_initial_rows(NumberTypeOf<T>(), rows.data(),
                                                         static_cast<const uint8_t*>(exists.data()),
                                                         In<int64_t>(ids).data(), In<int64_t>(splits).data(),
                                                         seeds_.data(), ids.NumElements(), seeds_.size(),
                                                         rows.dim_size(1), static_cast<int>(distribution_), a_, b_,
                                                         scratch.data(), out->data(), StreamOf(ctx))));
  }
};

#define FUSEDREC_REGISTER(T)                                                                                \
  REGISTER_KERNEL_BUILDER(                                                                                  \
      Name("Fusedrec>InitialRows").Device(DEVICE_GPU).TypeConstraint<T>("T").HostMemory("segment_splits"), \
      InitialRowsGpuOp<T>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
