#include <string>
#include <vector>

#include "common/kernel_util.h"
#include "fuse_ids/fuse_ids.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class FuseIdsOp : public OpKernel {
 public:
  explicit FuseIdsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_segments", &num_segments_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("segments", &segments_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ragged_features", &ragged_features_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("feature_names", &feature_names_));
    int64_t features, ragged;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_features", &features));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_ragged", &ragged));
    OP_REQUIRES(ctx,
                static_cast<int64_t>(segments_.size()) == features &&
                    static_cast<int64_t>(feature_names_.size()) == features &&
                    static_cast<int64_t>(ragged_features_.size()) == ragged,
                absl::InvalidArgumentError("segments, feature_names and ragged_features must have one entry for each "
                                           "input that they describe."));
    int64_t previous = 0;
    for (const int64_t segment : segments_) {
      OP_REQUIRES(ctx, segment >= previous && segment < num_segments_,
                  absl::InvalidArgumentError(absl::StrCat("segments must not decrease and lie in [0, ", num_segments_,
                                                          "), got ", segment, " after ", previous, ".")));
      previous = segment;
    }
    for (const int64_t feature : ragged_features_) {
      OP_REQUIRES(ctx, feature >= 0 && feature < features,
                  absl::InvalidArgumentError(absl::StrCat("ragged_features must lie in [0, ", features, "), got ",
                                                          feature, ".")));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList ids, row_splits;
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    OP_REQUIRES_OK(ctx, ctx->input_list("row_splits", &row_splits));
    for (int i = 0; i < row_splits.size(); ++i) {
      const int64_t f = ragged_features_[i];
      const std::string name = absl::StrCat("row_splits of feature '", feature_names_[f], "'");
      OP_REQUIRES_OK(ctx, RequireRank(name.c_str(), row_splits[i], 1));
      OP_REQUIRES_OK(ctx, RequireSplits(name.c_str(), In<int64_t>(row_splits[i]), ids[f].NumElements()));
    }

    Tensor *fused, *segment_splits, *lengths;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({ids.size()}), &lengths));
    std::vector<absl::Span<const int64_t>> features;
    int64_t total = 0;
    for (int f = 0; f < ids.size(); ++f) {
      OP_REQUIRES_OK(ctx, RequireRank(feature_names_[f].c_str(), ids[f], 1));
      features.push_back(In<int64_t>(ids[f]));
      lengths->flat<int64_t>()(f) = ids[f].NumElements();
      total += ids[f].NumElements();
    }
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({total}), &fused));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({num_segments_ + 1}), &segment_splits));
    FuseIds(features, segments_, Out<int64_t>(fused), Out<int64_t>(segment_splits));
  }

 private:
  int64_t num_segments_;
  std::vector<int64_t> segments_, ragged_features_;
  std::vector<std::string> feature_names_;
};

REGISTER_KERNEL_BUILDER(Name("Fusedrec>FuseIds").Device(DEVICE_CPU), FuseIdsOp);

}  // namespace fusedrec
