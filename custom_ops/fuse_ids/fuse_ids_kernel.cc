#include <string>
#include <vector>

#include "common/kernel_util.h"
#include "common/limits.h"
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
    OP_REQUIRES_OK(ctx, RequireIn("num_segments", num_segments_, 1, kMostSegments, "the number of tables."));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("segments", &segments_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ragged_features", &ragged_features_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("feature_names", &feature_names_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bag_sizes", &bag_sizes_));
    std::vector<std::string> combiners;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("combiners", &combiners));
    for (const std::string& combiner : combiners) {
      OP_REQUIRES(ctx, combiner == "sum" || combiner == "mean" || combiner == "sqrtn",
                  absl::InvalidArgumentError(
                      absl::StrCat("combiners must be 'sum', 'mean' or 'sqrtn', got '", combiner, "'.")));
      combiners_.push_back(combiner == "sum" ? Combiner::kSum : combiner == "mean" ? Combiner::kMean : Combiner::kSqrtn);
    }
    int64_t features, ragged;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_features", &features));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_ragged", &ragged));
    OP_REQUIRES(ctx,
                static_cast<int64_t>(segments_.size()) == features &&
                    static_cast<int64_t>(feature_names_.size()) == features &&
                    static_cast<int64_t>(bag_sizes_.size()) == features &&
                    static_cast<int64_t>(combiners_.size()) == features &&
                    static_cast<int64_t>(ragged_features_.size()) == ragged,
                absl::InvalidArgumentError("segments, feature_names, bag_sizes, combiners and ragged_features must "
                                           "have one entry for each input that they describe."));
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

    std::vector<absl::Span<const int64_t>> splits_of(ids.size());
    for (int i = 0; i < row_splits.size(); ++i) splits_of[ragged_features_[i]] = In<int64_t>(row_splits[i]);

    Tensor *fused, *segment_splits, *bag_splits, *bag_scale, *feature_bags;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(4, TensorShape({ids.size()}), &feature_bags));
    std::vector<absl::Span<const int64_t>> features;
    int64_t total = 0, total_bags = 0;
    for (int f = 0; f < ids.size(); ++f) {
      OP_REQUIRES_OK(ctx, RequireRank(feature_names_[f].c_str(), ids[f], 1));
      const int64_t num = ids[f].NumElements(), size = bag_sizes_[f];
      OP_REQUIRES(ctx, size > 0 ? num % size == 0 : size == 0 && !splits_of[f].empty(),
                  absl::InvalidArgumentError(absl::StrCat("bag_sizes of feature '", feature_names_[f], "' must divide its ",
                                                          num, " ids, or be 0 with row_splits, got ", size, ".")));
      features.push_back(In<int64_t>(ids[f]));
      const int64_t bags = size > 0 ? num / size : static_cast<int64_t>(splits_of[f].size()) - 1;
      feature_bags->flat<int64_t>()(f) = bags;
      total += num;
      total_bags += bags;
    }
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({total}), &fused));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({num_segments_ + 1}), &segment_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({total_bags + 1}), &bag_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(3, TensorShape({total_bags}), &bag_scale));
    FuseIds(features, segments_, Out<int64_t>(fused), Out<int64_t>(segment_splits));
    int64_t first_id = 0, first_bag = 0;
    for (int f = 0; f < ids.size(); ++f) {
      const int64_t bags = feature_bags->flat<int64_t>()(f);
      const absl::Span<const int64_t> by_row = bag_sizes_[f] > 0 ? absl::Span<const int64_t>() : splits_of[f];
      MakeBags(by_row, bag_sizes_[f], combiners_[f], first_id, Out<int64_t>(bag_splits).subspan(first_bag, bags + 1),
               Out<float>(bag_scale).subspan(first_bag, bags));
      first_id += ids[f].NumElements();
      first_bag += bags;
    }
  }

 private:
  int64_t num_segments_;
  std::vector<int64_t> segments_, ragged_features_, bag_sizes_;
  std::vector<Combiner> combiners_;
  std::vector<std::string> feature_names_;
};

REGISTER_KERNEL_BUILDER(Name("Fusedrec>FuseIds").Device(DEVICE_CPU), FuseIdsOp);
// Ids come from the input pipeline, which is on the host, and go to the device fused, in one copy.
REGISTER_KERNEL_BUILDER(Name("Fusedrec>FuseIds")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("ids")
                            .HostMemory("row_splits")
                            .HostMemory("fused")
                            .HostMemory("segment_splits")
                            .HostMemory("bag_splits")
                            .HostMemory("bag_scale")
                            .HostMemory("feature_bags"),
                        FuseIdsOp);

}  // namespace fusedrec
