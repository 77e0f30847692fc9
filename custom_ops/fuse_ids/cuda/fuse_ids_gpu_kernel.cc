#include <vector>

#include "common/gpu_kernel_util.h"
#include "fuse_ids/cuda/fuse_ids_cuda.h"
#include "fuse_ids/fuse_ids_base.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Waits once where a feature is ragged, for the check of its row_splits.
class FuseIdsGpuOp : public FuseIdsBase {
 public:
  using FuseIdsBase::FuseIdsBase;

  void Compute(OpKernelContext* ctx) override {
    Features inputs;
    OP_REQUIRES_OK(ctx, Read(ctx, &inputs));
    std::vector<FusedrecFeature> features;
    int64_t num_ids = 0;
    for (int f = 0; f < inputs.ids.size(); ++f) {
      const Tensor &ids = inputs.ids[f], *splits = inputs.splits_of[f];
      features.push_back({In<int64_t>(ids).data(), splits == nullptr ? nullptr : In<int64_t>(*splits).data(),
                          ids.NumElements(), splits == nullptr ? 0 : splits->NumElements(), bag_size(f),
                          static_cast<int64_t>(combiner(f))});
      if (splits != nullptr) OP_REQUIRES_OK(ctx, RequireSize("the size of row_splits", splits->NumElements()));
      num_ids += ids.NumElements();
    }
    OP_REQUIRES_OK(ctx, RequireSize("the number of ids of all features", num_ids));
    Tensor scratch;
    Outputs out;
    OP_REQUIRES_OK(ctx, Allocate(ctx, inputs, &out));
    OP_REQUIRES_OK(ctx, RequireSize("the number of bags of all features", out.bag_scale->NumElements()));
    OP_REQUIRES_OK(ctx, AllocateScratch(ctx, fusedrec_fuse_ids_scratch_bytes(features.size()), &scratch));
    int32_t wrong;
    OP_REQUIRES_OK(ctx, CudaStatus("fuse_ids",
                                   fusedrec_fuse_ids(features.data(), features.size(), num_ids,
                                                     out.bag_scale->NumElements(), scratch.data(),
                                                     Out<int64_t>(out.fused).data(), Out<int64_t>(out.bag_splits).data(),
                                                     Out<float>(out.bag_scale).data(), &wrong, StreamOf(ctx))));
    if (wrong < 0) return;
    std::vector<int64_t> splits(features[wrong].num_splits);  // the message quotes them
    OP_REQUIRES_OK(ctx, CudaStatus("copy of row_splits",
                                   fusedrec_copy_to_host(splits.data(), features[wrong].row_splits,
                                                         splits.size() * sizeof(int64_t), StreamOf(ctx))));
    OP_REQUIRES_OK(ctx, CheckSplits(inputs, wrong, splits));
  }
};

REGISTER_KERNEL_BUILDER(
    Name("Fusedrec>FuseIds").Device(DEVICE_GPU).HostMemory("segment_splits").HostMemory("feature_bags"), FuseIdsGpuOp);

}  // namespace fusedrec
