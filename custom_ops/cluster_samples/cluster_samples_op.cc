#include "cluster_samples/cluster_samples.h"

#include "common/kernel_util.h"
#include "common/shapes.h"

namespace fusedrec {

REGISTER_OP("Fusedrec>ClusterSamples")
    .Input("ids: num_features * int64").Input("row_splits: num_features * int64").Input("sizes: int64")
    .Output("order: int64")
    .Attr("num_features: int >= 1").Attr("tables: list(int)")
    .SetShapeFn(Shapes("num_features*[n] num_features*[b+1] [m] -> [b]"))
    .Doc("Orders the samples of a batch so that its micro-batches share few ids (NestPipe, section V.C).");

// One thread clusters a batch. The input pipeline clusters several batches at once.
class ClusterSamplesOp : public OpKernel {
 public:
  explicit ClusterSamplesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int64_t features;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_features", &features));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tables", &tables_));
    OP_REQUIRES(ctx, static_cast<int64_t>(tables_.size()) == features,
        Invalid("tables must have one entry for each of the ", features, " features, got ", tables_.size(), "."));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList ids, row_splits;
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    OP_REQUIRES_OK(ctx, ctx->input_list("row_splits", &row_splits));
    const Tensor& sizes = ctx->input(2 * ids.size());
    std::vector<FeatureIds> features;
    int64_t total = 0;
    for (int f = 0; f < ids.size(); ++f) {
      OP_REQUIRES_OK(ctx, RequireRank(absl::StrCat("ids of feature ", f).c_str(), ids[f], 1));
      const std::string name = absl::StrCat("row_splits of feature ", f);
      OP_REQUIRES_OK(ctx, RequireRank(name.c_str(), row_splits[f], 1));
      OP_REQUIRES_OK(ctx, RequireSplits(name.c_str(), In<int64_t>(row_splits[f]), ids[f].NumElements()));
      features.push_back({tables_[f], In<int64_t>(ids[f]), In<int64_t>(row_splits[f])});
      total += ids[f].NumElements();
    }
    const int64_t samples = row_splits[0].NumElements() - 1;
    OP_REQUIRES_OK(ctx, RequireIn("the number of ids", total, 0, kMostPositions, "smaller batches."));
    OP_REQUIRES_OK(ctx, RequireIn("the number of samples", samples, 0, kMostPositions, "smaller batches."));
    for (int f = 0; f < ids.size(); ++f) {
      OP_REQUIRES(ctx, row_splits[f].NumElements() == samples + 1,
          Invalid("features of one batch must have the same number of samples, got ", samples, " in feature 0 and ",
              row_splits[f].NumElements() - 1, " in feature ", f, ". Cut all features by the same samples."));
    }
    OP_REQUIRES_OK(ctx, RequireRank("sizes", sizes, 1));
    OP_REQUIRES_OK(ctx, RequireSizes(In<int64_t>(sizes), samples));

    Tensor* order;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({samples}), &order));
    OP_REQUIRES_OK(ctx, ClusterSamples(features, In<int64_t>(sizes), Out<int64_t>(order)));
  }

 private:
  static absl::Status RequireSizes(absl::Span<const int64_t> sizes, int64_t samples) {
    FUSEDREC_TRY(RequireIn("the number of sizes", sizes.size(), 1, kMostMicroBatches, "fewer micro-batches."));
    int64_t left = samples;
    for (size_t m = 0; m < sizes.size(); ++m) {
      FUSEDREC_TRY(RequireIn(absl::StrCat("sizes[", m, "]").c_str(), sizes[m], 0, left,
                                   "sizes of micro-batches that sum to the samples of the batch."));
      left -= sizes[m];
    }
    if (left == 0) return absl::OkStatus();
    return Invalid("sizes must sum to the ", samples, " samples of the batch, got ", samples - left, " in ",
        sizes.size(), " micro-batches. Take the differences of piece_bounds.");
  }

  std::vector<int64_t> tables_;
};

// The input pipeline is on the host.
FUSEDREC_KERNEL_ON_HOST("ClusterSamples", ClusterSamplesOp,
                        .HostMemory("ids").HostMemory("row_splits").HostMemory("sizes").HostMemory("order"));

}  // namespace fusedrec
