#include <vector>

#include "fuse_ids/fuse_ids_base.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class FuseIdsOp : public FuseIdsBase {
 public:
  using FuseIdsBase::FuseIdsBase;

  void Compute(OpKernelContext* ctx) override {
    Features features;
    OP_REQUIRES_OK(ctx, Read(ctx, &features));
    for (int i = 0; i < features.row_splits.size(); ++i) {
      OP_REQUIRES_OK(ctx, CheckSplits(features, ragged_features()[i], In<int64_t>(features.row_splits[i])));
    }
    Outputs out;
    OP_REQUIRES_OK(ctx, Allocate(ctx, features, &out));
    std::vector<absl::Span<const int64_t>> ids;
    for (const Tensor& of_feature : features.ids) ids.push_back(In<int64_t>(of_feature));
    FuseIds(ids, Out<int64_t>(out.fused));
    int64_t first_id = 0, first_bag = 0;
    for (size_t f = 0; f < ids.size(); ++f) {
      const int64_t bags = Out<int64_t>(out.feature_bags)[f];
      const absl::Span<const int64_t> by_row =
          bag_size(f) > 0 ? absl::Span<const int64_t>() : In<int64_t>(*features.splits_of[f]);
      MakeBags(by_row, bag_size(f), combiner(f), first_id, Out<int64_t>(out.bag_splits).subspan(first_bag, bags + 1),
               Out<float>(out.bag_scale).subspan(first_bag, bags));
      first_id += ids[f].size();
      first_bag += bags;
    }
  }
};

REGISTER_KERNEL_BUILDER(Name("Fusedrec>FuseIds").Device(DEVICE_CPU), FuseIdsOp);

}  // namespace fusedrec
