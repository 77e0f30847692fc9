#include "collective_marks/collective_marks.h"
#include "common/kernel_util.h"
#include "tensorflow/core/framework/common_shape_fns.h"

namespace fusedrec {

REGISTER_OP("Fusedrec>MarkCollective")
    .Input("value: T")
    .Output("same: T")
    .Attr("T: type").Attr("collective: string").Attr("ended: bool")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("Passes a tensor through and marks that a collective begins, or has ended, for the watchdog of this process.");

class MarkCollectiveOp : public OpKernel {
 public:
  explicit MarkCollectiveOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string name;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("collective", &name));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ended", &ended_));
    mark_ = MarkOf(name);
  }

  void Compute(OpKernelContext* ctx) override {
    (ended_ ? End : Begin)(mark_);
    ctx->set_output(0, ctx->input(0));
  }

  bool IsExpensive() override { return false; }

 private:
  CollectiveMark* mark_ = nullptr;
  bool ended_ = false;
};

REGISTER_KERNEL_BUILDER(Name("Fusedrec>MarkCollective").Device(tensorflow::DEVICE_CPU), MarkCollectiveOp);
// The tensor stays on the device; nothing reads it.
REGISTER_KERNEL_BUILDER(Name("Fusedrec>MarkCollective").Device(tensorflow::DEVICE_GPU), MarkCollectiveOp);

}  // namespace fusedrec
