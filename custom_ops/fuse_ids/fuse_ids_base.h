// The common part of fuse_ids's kernels: they read attributes and sizes, and allocate outputs.
#pragma once

#include <string>
#include <vector>

#include "common/kernel_util.h"
#include "common/limits.h"
#include "fuse_ids/fuse_ids.h"

namespace fusedrec {

class FuseIdsBase : public tensorflow::OpKernel {
 public:
  explicit FuseIdsBase(tensorflow::OpKernelConstruction* ctx) : tensorflow::OpKernel(ctx) {
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
      combiners_.push_back(combiner == "sum"    ? Combiner::kSum
                           : combiner == "mean" ? Combiner::kMean
                                                : Combiner::kSqrtn);
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

 protected:
  struct Features {
    tensorflow::OpInputList ids, row_splits;
    std::vector<const tensorflow::Tensor*> splits_of;  // by feature; null: it is not ragged
  };

  struct Outputs {
    tensorflow::Tensor *fused, *segment_splits, *bag_splits, *bag_scale, *feature_bags;
  };

  // Reads the inputs. The caller checks the values of row_splits, where they are.
  absl::Status Read(tensorflow::OpKernelContext* ctx, Features* features) const {
    TF_RETURN_IF_ERROR(ctx->input_list("ids", &features->ids));
    TF_RETURN_IF_ERROR(ctx->input_list("row_splits", &features->row_splits));
    features->splits_of.assign(features->ids.size(), nullptr);
    for (int f = 0; f < features->ids.size(); ++f) {
      TF_RETURN_IF_ERROR(RequireRank(feature_names_[f].c_str(), features->ids[f], 1));
    }
    for (int i = 0; i < features->row_splits.size(); ++i) {
      const int64_t f = ragged_features_[i];
      const tensorflow::Tensor& splits = features->row_splits[i];
      TF_RETURN_IF_ERROR(RequireRank(NameOfSplits(f).c_str(), splits, 1));
      if (splits.NumElements() == 0) return CheckSplits(*features, f, {});
      features->splits_of[f] = &splits;
    }
    return absl::OkStatus();
  }

  // splits: row_splits of feature f, in host memory.
  absl::Status CheckSplits(const Features& features, int64_t f, absl::Span<const int64_t> splits) const {
    return RequireSplits(NameOfSplits(f).c_str(), splits, features.ids[f].NumElements());
  }

  // Counts ids and bags, and writes the outputs that are in host memory: segment_splits and feature_bags.
  absl::Status Allocate(tensorflow::OpKernelContext* ctx, const Features& features, Outputs* out) const {
    const int64_t num_features = features.ids.size();
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, tensorflow::TensorShape({num_segments_ + 1}), &out->segment_splits));
    TF_RETURN_IF_ERROR(ctx->allocate_output(4, tensorflow::TensorShape({num_features}), &out->feature_bags));
    std::vector<int64_t> sizes;
    int64_t num_ids = 0, num_bags = 0;
    for (int64_t f = 0; f < num_features; ++f) {
      const int64_t num = features.ids[f].NumElements(), size = bag_sizes_[f];
      if (size > 0 ? num % size != 0 : size < 0 || features.splits_of[f] == nullptr) {
        return absl::InvalidArgumentError(absl::StrCat("bag_sizes of feature '", feature_names_[f], "' must divide its ",
                                                       num, " ids, or be 0 with row_splits, got ", size, "."));
      }
      const int64_t bags = size > 0 ? num / size : features.splits_of[f]->NumElements() - 1;
      Out<int64_t>(out->feature_bags)[f] = bags;
      sizes.push_back(num);
      num_ids += num;
      num_bags += bags;
    }
    CountSegments(sizes, segments_, Out<int64_t>(out->segment_splits));
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, tensorflow::TensorShape({num_ids}), &out->fused));
    TF_RETURN_IF_ERROR(ctx->allocate_output(2, tensorflow::TensorShape({num_bags + 1}), &out->bag_splits));
    return ctx->allocate_output(3, tensorflow::TensorShape({num_bags}), &out->bag_scale);
  }

  const std::vector<int64_t>& ragged_features() const { return ragged_features_; }
  int64_t bag_size(int64_t f) const { return bag_sizes_[f]; }
  Combiner combiner(int64_t f) const { return combiners_[f]; }

 private:
  std::string NameOfSplits(int64_t f) const { return absl::StrCat("row_splits of feature '", feature_names_[f], "'"); }

  int64_t num_segments_;
  std::vector<int64_t> segments_, ragged_features_, bag_sizes_;
  std::vector<Combiner> combiners_;
  std::vector<std::string> feature_names_;
};

}  // namespace fusedrec
