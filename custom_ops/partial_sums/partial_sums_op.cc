#include "common/bucket.h"
#include "common/kernel_util.h"
#include "common/shapes.h"
#include "partial_sums/partial_sums.h"
#include "rank_partition/rank_partition.h"
#include "segment_unique/segment_unique.h"

namespace fusedrec {

REGISTER_OP("Fusedrec>PartialSums")
    .Input("ids: int64").Input("segment_splits: int64").Input("bag_splits: int64")
    .Output("message: int64").Output("send_splits: int32").Output("id_splits: int32")
    .Output("terms: int64").Output("terms_splits: int32").Output("sum_splits: int32")
    .Output("index: int32").Output("sum_bags: int64")
    .Attr("num_ranks: int >= 1").Attr("row_bytes: int >= 1")
    .SetShapeFn(Shapes("[n] [s] [g] -> [?] [num_ranks] [num_ranks] [?] [num_ranks] [num_ranks] [?] [g]"))
    .Doc("Packs ids into messages whose owners answer with sums of a bag's rows, where that is fewer bytes.");

REGISTER_OP("Fusedrec>PartialSumTerms")
    .Input("terms: int64").Input("terms_splits: int32").Input("received_splits: int32")
    .Output("index: int32").Output("splits: int64").Output("sum_splits: int32")
    .Attr("num_segments: int >= 1")
    .SetShapeFn(Shapes("[m] [r] [r] -> [?] [?] [r]"))
    .Doc("Reads at the owner which received ids each sum has.");

namespace {

absl::Status RequireBagsInSegments(absl::Span<const int64_t> segments, absl::Span<const int64_t> bags) {
  size_t s = 0;
  for (size_t g = 0; g + 1 < bags.size(); ++g) {
    while (s + 2 < segments.size() && segments[s + 1] <= bags[g]) ++s;
    if (bags[g] < bags[g + 1] && bags[g + 1] > segments[s + 1]) {
      return Invalid("bag_splits must keep each bag inside one segment, got bag ", g, " with ids ", bags[g], " to ",
          bags[g + 1] - 1, " across the bound ", segments[s + 1], ". Pass the results of fuse_ids.");
    }
  }
  return absl::OkStatus();
}

}  // namespace

class PartialSumsOp : public OpKernel {
 public:
  explicit PartialSumsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_ranks", &num_ranks_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("row_bytes", &row_bytes_));
    OP_REQUIRES_OK(ctx, RequireIn("num_ranks", num_ranks_, 1, kMostRanks, "the number of ranks."));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &ids = ctx->input(0), &segments = ctx->input(1), &bags = ctx->input(2);
    const int64_t num_ids = ids.NumElements();
    OP_REQUIRES_OK(ctx, RequireRank("ids", ids, 1));
    OP_REQUIRES_OK(ctx, RequireRank("segment_splits", segments, 1));
    OP_REQUIRES_OK(ctx, RequireRank("bag_splits", bags, 1));
    const auto segment_splits = In<int64_t>(segments), bag_splits = In<int64_t>(bags);
    OP_REQUIRES_OK(ctx, RequireSplits("segment_splits", segment_splits, num_ids));
    OP_REQUIRES_OK(ctx, RequireIn("the size of segment_splits", segments.NumElements(), 1, kMostSegments + 1,
                                  "fewer tables."));
    OP_REQUIRES_OK(ctx, RequireSplits("bag_splits", bag_splits, num_ids));
    OP_REQUIRES_OK(ctx, RequireBagsInSegments(segment_splits, bag_splits));
    const int64_t size = num_ids + num_ranks_ * (segments.NumElements() - 1);
    OP_REQUIRES_OK(ctx, RequireIn("the size of the message", size, 0, kMostPositions, "smaller batches, or fewer tables."));
    Tensor unique, unique_splits, inverse, restore;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT64, ids.shape(), &unique));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT64, segments.shape(), &unique_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT32, ids.shape(), &inverse));
    const ParallelFor pool = CpuPool(ctx);
    const int64_t num_unique = SegmentUnique(In<int64_t>(ids), segment_splits, pool, Out<int64_t>(&unique),
                                             Out<int64_t>(&unique_splits), Out<int32_t>(&inverse));
    Tensor *message, *send_splits, *id_splits;
    const TensorShape ranks({num_ranks_}), padded({BucketedSize(num_unique + size - num_ids)});
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, padded, &message));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, ranks, &send_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, ranks, &id_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT32, TensorShape({num_unique}), &restore));
    RankPartition(In<int64_t>(unique).subspan(0, num_unique), In<int64_t>(unique_splits), Owner::kHashRange, pool,
                  Out<int64_t>(message), Out<int32_t>(send_splits), Out<int32_t>(id_splits), Out<int32_t>(&restore));
    const BagIds bag_ids{segment_splits, bag_splits, In<int64_t>(unique_splits), In<int32_t>(inverse)};
    const SumPlan plan = PlanSums(bag_ids, ChooseSums(bag_ids, num_ranks_, row_bytes_), In<int32_t>(restore),
                                  In<int32_t>(*id_splits));
    OP_REQUIRES_OK(ctx, Give(ctx, 3, plan.terms));
    OP_REQUIRES_OK(ctx, Give(ctx, 4, plan.terms_splits));
    OP_REQUIRES_OK(ctx, Give(ctx, 5, plan.sum_splits));
    OP_REQUIRES_OK(ctx, Give(ctx, 6, plan.index));
    OP_REQUIRES_OK(ctx, Give(ctx, 7, plan.bag_splits));
  }

 private:
  int64_t num_ranks_, row_bytes_;
};

class PartialSumTermsOp : public OpKernel {
 public:
  explicit PartialSumTermsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_segments", &segments_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &terms = ctx->input(0), &terms_splits = ctx->input(1), &received = ctx->input(2);
    OP_REQUIRES_OK(ctx, RequireRank("terms", terms, 1));
    OP_REQUIRES_OK(ctx, RequireRank("terms_splits", terms_splits, 1));
    OP_REQUIRES_OK(ctx, RequireRank("received_splits", received, 1));
    OP_REQUIRES(ctx, terms_splits.NumElements() == received.NumElements(),
        Invalid("terms_splits must have one entry for each of the ", received.NumElements(), " sources, got ",
            terms_splits.NumElements(), ". Pass the splits of both messages."));
    std::vector<int32_t> id_splits;
    for (const int32_t entries : In<int32_t>(received)) {
      OP_REQUIRES_OK(ctx, RequireIn("an entry of received_splits", entries, segments_, kMostPositions,
                                    "the splits of the received message."));
      id_splits.push_back(entries - static_cast<int32_t>(segments_));
    }
    std::vector<int32_t> index;
    std::vector<int64_t> splits;
    Tensor* sum_splits;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, received.shape(), &sum_splits));
    OP_REQUIRES_OK(ctx, ReadSums(In<int64_t>(terms), In<int32_t>(terms_splits), id_splits, &index, &splits,
                                 Out<int32_t>(sum_splits)));
    OP_REQUIRES_OK(ctx, Give(ctx, 0, index));
    OP_REQUIRES_OK(ctx, Give(ctx, 1, splits));
  }

 private:
  int64_t segments_;
};

// In host memory: tables on a GPU send rows.
FUSEDREC_KERNEL_ON_HOST("PartialSums", PartialSumsOp,
                        .HostMemory("ids").HostMemory("segment_splits").HostMemory("bag_splits").HostMemory("message")
                        .HostMemory("send_splits").HostMemory("id_splits").HostMemory("terms").HostMemory("terms_splits")
                        .HostMemory("sum_splits").HostMemory("index").HostMemory("sum_bags"));
FUSEDREC_KERNEL_ON_HOST("PartialSumTerms", PartialSumTermsOp,
                        .HostMemory("terms").HostMemory("terms_splits").HostMemory("received_splits")
                        .HostMemory("index").HostMemory("splits").HostMemory("sum_splits"));

}  // namespace fusedrec
