// Concatenates the ids of a group's features, segment by segment: step a.1 of FusedRec (section 3, "Embedding Fusion").
//
// One op replaces a cast, a shape, a concat and a cumulative sum per feature. It also refuses row_splits that do not
// describe their values, naming the feature, before anything is computed from them.

#include "common/gpu_kernel_util.h"
#include "common/shapes.h"
#include "fuse_ids/fuse_ids_cuda.h"

namespace fusedrec {

REGISTER_OP("Fusedrec>FuseIds")
    .Input("ids: num_features * int64").Input("row_splits: num_ragged * int64")
    .Output("fused: int64").Output("segment_splits: int64").Output("bag_splits: int64").Output("bag_scale: float")
    .Output("feature_bags: int64")
    .Attr("num_features: int >= 1").Attr("num_ragged: int >= 0").Attr("num_segments: int >= 1")
    .Attr("segments: list(int)").Attr("ragged_features: list(int)").Attr("feature_names: list(string)")
    .Attr("bag_sizes: list(int)").Attr("combiners: list(string)")
    .SetShapeFn(Shapes("num_features*[n] num_ragged*[r] -> [?] [num_segments+1] [?] [?] [num_features]"))
    .Doc("Concatenates the ids of a group's features, segment by segment (FusedRec, section 3, 'Embedding Fusion').");

namespace {

//   sizes           [F] ids of each feature
//   segments        [F] segment of each feature, non-decreasing, in [0, S)
//   segment_splits  [S+1] out: segment s is fused[segment_splits[s]:segment_splits[s+1]]
void CountSegments(absl::Span<const int64_t> sizes, absl::Span<const int64_t> segments,
                   absl::Span<int64_t> segment_splits) {
  std::fill(segment_splits.begin(), segment_splits.end(), 0);
  for (size_t f = 0; f < sizes.size(); ++f) segment_splits[segments[f] + 1] += sizes[f];
  for (size_t s = 1; s < segment_splits.size(); ++s) segment_splits[s] += segment_splits[s - 1];
}

// Writes the bags of one feature. They follow the bags of the features before it.
//   row_splits  ends of its bags among its ids, from 0 on; empty: bags of bag_size ids
//   first_id    of the feature among all ids
//   splits      out: its bags + 1 entries, the first of which is first_id
//   scale       out: one entry for each bag
[[maybe_unused]]  // no GPU form calls it
void MakeBags(absl::Span<const int64_t> row_splits, int64_t bag_size, Combiner combiner, int64_t first_id,
              absl::Span<int64_t> splits, absl::Span<float> scale) {
  splits[0] = first_id;
  const int64_t bags = scale.size();
  if (row_splits.empty()) {  // all alike
    for (int64_t g = 0; g < bags; ++g) splits[g + 1] = first_id + (g + 1) * bag_size;
    std::fill(scale.begin(), scale.end(), ScaleOfBag(combiner, bag_size));
    return;
  }
  for (int64_t g = 0; g < bags; ++g) {
    splits[g + 1] = first_id + row_splits[g + 1];
    scale[g] = ScaleOfBag(combiner, splits[g + 1] - splits[g]);
  }
}

}  // namespace

template <On kOn>
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
          Invalid("combiners must be 'sum', 'mean' or 'sqrtn', got '", combiner, "'."));
      combiners_.push_back(combiner == "sum"    ? Combiner::kSum
                           : combiner == "mean" ? Combiner::kMean
                                                : Combiner::kSqrtn);
    }
    int64_t features, ragged;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_features", &features));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_ragged", &ragged));
    OP_REQUIRES(ctx,
        static_cast<int64_t>(segments_.size()) == features && static_cast<int64_t>(feature_names_.size()) == features &&
            static_cast<int64_t>(bag_sizes_.size()) == features &&
            static_cast<int64_t>(combiners_.size()) == features &&
            static_cast<int64_t>(ragged_features_.size()) == ragged,
        Invalid("segments, feature_names, bag_sizes, combiners and ragged_features must "
                "have one entry for each input that they describe."));
    int64_t previous = 0;
    for (const int64_t segment : segments_) {
      OP_REQUIRES(ctx, segment >= previous && segment < num_segments_,
          Invalid("segments must not decrease and lie in [0, ", num_segments_, "), got ", segment, " after ", previous,
              "."));
      previous = segment;
    }
    for (const int64_t feature : ragged_features_) {
      OP_REQUIRES(ctx, feature >= 0 && feature < features,
          Invalid("ragged_features must lie in [0, ", features, "), got ", feature, "."));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    Features features;
    Outputs out;
    OP_REQUIRES_OK(ctx, Read(ctx, &features));
    OP_REQUIRES_OK(ctx, Allocate(ctx, features, &out));
    if constexpr (kOn == On::kGpu) {
      OP_REQUIRES_OK(ctx, RunOnGpu(ctx, features, &out));
    } else {
      int64_t first_id = 0, first_bag = 0;
      for (int f = 0; f < features.ids.size(); ++f) {
        const absl::Span<const int64_t> ids = In<int64_t>(features.ids[f]);
        const int64_t bags = Out<int64_t>(out.feature_bags)[f];
        const absl::Span<const int64_t> by_row =
            bag_sizes_[f] > 0 ? absl::Span<const int64_t>() : In<int64_t>(*features.splits_of[f]);
        std::copy(ids.begin(), ids.end(), Out<int64_t>(out.fused).begin() + first_id);
        MakeBags(by_row, bag_sizes_[f], combiners_[f], first_id, Out<int64_t>(out.bag_splits).subspan(first_bag, bags + 1),
                 Out<float>(out.bag_scale).subspan(first_bag, bags));
        first_id += ids.size();
        first_bag += bags;
      }
    }
  }

 private:
  struct Features {
    tensorflow::OpInputList ids, row_splits;
    std::vector<const Tensor*> splits_of;  // by feature; null: it is not ragged
  };

  struct Outputs {
    Tensor *fused, *segment_splits, *bag_splits, *bag_scale, *feature_bags;
  };

  absl::Status Read(OpKernelContext* ctx, Features* features) const {
    FUSEDREC_TRY(ctx->input_list("ids", &features->ids));
    FUSEDREC_TRY(ctx->input_list("row_splits", &features->row_splits));
    features->splits_of.assign(features->ids.size(), nullptr);
    for (int f = 0; f < features->ids.size(); ++f) {
      FUSEDREC_TRY(RequireRank(feature_names_[f].c_str(), features->ids[f], 1));
    }
    for (int i = 0; i < features->row_splits.size(); ++i) {
      const int64_t f = ragged_features_[i];
      const Tensor& splits = features->row_splits[i];
      const std::string name = NameOfSplits(f);
      FUSEDREC_TRY(RequireRank(name.c_str(), splits, 1));
      if (splits.NumElements() == 0) return CheckSplits(*features, f, {});
      FUSEDREC_TRY(RequireSize(name.c_str(), splits.NumElements()));
      if (kOn == On::kCpu) FUSEDREC_TRY(CheckSplits(*features, f, In<int64_t>(splits)));
      features->splits_of[f] = &splits;
    }
    return absl::OkStatus();
  }

  // splits: row_splits of feature f, in host memory.
  absl::Status CheckSplits(const Features& features, int64_t f, absl::Span<const int64_t> splits) const {
    return RequireSplits(NameOfSplits(f).c_str(), splits, features.ids[f].NumElements());
  }

  // Counts ids and bags, and writes the outputs that are in host memory: segment_splits and feature_bags.
  absl::Status Allocate(OpKernelContext* ctx, const Features& features, Outputs* out) const {
    const int64_t num_features = features.ids.size();
    FUSEDREC_TRY(ctx->allocate_output(1, TensorShape({num_segments_ + 1}), &out->segment_splits));
    FUSEDREC_TRY(ctx->allocate_output(4, TensorShape({num_features}), &out->feature_bags));
    std::vector<int64_t> sizes;
    int64_t num_ids = 0, num_bags = 0;
    for (int64_t f = 0; f < num_features; ++f) {
      const int64_t num = features.ids[f].NumElements(), size = bag_sizes_[f];
      if (size > 0 ? num % size != 0 : size < 0 || features.splits_of[f] == nullptr) {
        return Invalid("bag_sizes of feature '", feature_names_[f], "' must divide its ", num,
            " ids, or be 0 with row_splits, got ", size, ".");
      }
      const int64_t bags = size > 0 ? num / size : features.splits_of[f]->NumElements() - 1;
      Out<int64_t>(out->feature_bags)[f] = bags;
      sizes.push_back(num);
      num_ids += num;
      num_bags += bags;
    }
    FUSEDREC_TRY(RequireSize("the number of ids of all features", num_ids));
    FUSEDREC_TRY(RequireSize("the number of bags of all features", num_bags));
    CountSegments(sizes, segments_, Out<int64_t>(out->segment_splits));
    FUSEDREC_TRY(ctx->allocate_output(0, TensorShape({num_ids}), &out->fused));
    FUSEDREC_TRY(ctx->allocate_output(2, TensorShape({num_bags + 1}), &out->bag_splits));
    return ctx->allocate_output(3, TensorShape({num_bags}), &out->bag_scale);
  }

  // Waits once where a feature is ragged, for the check of its row_splits.
  absl::Status RunOnGpu(OpKernelContext* ctx, const Features& inputs, Outputs* out) const {
    Gpu gpu(ctx);
    std::vector<FusedrecFeature> features;
    for (int f = 0; f < inputs.ids.size(); ++f) {
      const Tensor &ids = inputs.ids[f], *splits = inputs.splits_of[f];
      features.push_back({In<int64_t>(ids).data(), splits == nullptr ? nullptr : In<int64_t>(*splits).data(),
                          ids.NumElements(), splits == nullptr ? 0 : splits->NumElements(), bag_sizes_[f],
                          static_cast<int64_t>(combiners_[f])});
    }
    int32_t wrong;
    FUSEDREC_TRY(gpu.Check(
        "fuse_ids", fusedrec_fuse_ids(features.data(), features.size(), out->fused->NumElements(),
                        out->bag_scale->NumElements(), &gpu.memory, Out<int64_t>(out->fused).data(),
                        Out<int64_t>(out->bag_splits).data(), Out<float>(out->bag_scale).data(), &wrong, gpu.stream)));
    if (wrong < 0) return absl::OkStatus();
    std::vector<int64_t> splits;  // the message quotes them
    FUSEDREC_TRY(gpu.CopyToHost(*inputs.splits_of[wrong], &splits));
    return CheckSplits(inputs, wrong, splits);
  }

  std::string NameOfSplits(int64_t f) const { return absl::StrCat("row_splits of feature '", feature_names_[f], "'"); }

  int64_t num_segments_;
  std::vector<int64_t> segments_, ragged_features_, bag_sizes_;
  std::vector<Combiner> combiners_;
  std::vector<std::string> feature_names_;
};

FUSEDREC_KERNEL_ON_BOTH("FuseIds", FuseIdsOp, .HostMemory("segment_splits").HostMemory("feature_bags"));

}  // namespace fusedrec
