#include <string>
#include <vector>

#include "common/bucket.h"
#include "common/kernel_util.h"
#include "common/limits.h"
#include "rank_partition/rank_partition.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class RankPartitionOp : public OpKernel {
 public:
  explicit RankPartitionOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string owner;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_ranks", &num_ranks_));
    OP_REQUIRES_OK(ctx, RequireIn("num_ranks", num_ranks_, 1, kMostRanks, "the number of ranks."));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("owner", &owner));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("id_bits", &id_bits_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("segment_names", &segment_names_));
    owner_ = owner == "tfra" ? Owner::kTfra : Owner::kHashRange;
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& ids = ctx->input(0);
    const Tensor& splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("unique_ids", ids, 1));
    OP_REQUIRES_OK(ctx, RequireRank("unique_splits", splits, 1));
    OP_REQUIRES_OK(ctx, RequireSplits("unique_splits", In<int64_t>(splits), ids.NumElements()));
    if (id_bits_ < 64) OP_REQUIRES_OK(ctx, RequireIdsFit(In<int64_t>(ids), In<int64_t>(splits)));

    const int64_t num_ids = ids.NumElements();
    const int64_t segments = splits.NumElements() - 1;
    OP_REQUIRES_OK(ctx, RequireIn("the size of unique_splits", segments + 1, 1, kMostSegments + 1, "fewer tables."));
    OP_REQUIRES_OK(ctx, RequireIn("the size of the message", num_ids + num_ranks_ * segments, 0, kMostPositions,
                                  "smaller batches, or fewer tables."));
    Tensor *message, *send_splits, *id_splits, *restore;
    const int64_t padded = BucketedSize(num_ids + num_ranks_ * segments);
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({padded}), &message));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({num_ranks_}), &send_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({num_ranks_}), &id_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(3, ids.shape(), &restore));

    RankPartition(In<int64_t>(ids), In<int64_t>(splits), owner_, CpuPool(ctx), Out<int64_t>(message),
                  Out<int32_t>(send_splits), Out<int32_t>(id_splits), Out<int32_t>(restore));
  }

 private:
  // The bits above id_bits name the table in a merged key (MTGRBoost eq. 8): an id that reaches into them would be
  // another table's row.
  absl::Status RequireIdsFit(absl::Span<const int64_t> ids, absl::Span<const int64_t> splits) const {
    uint64_t seen = 0;
    for (const int64_t id : ids) seen |= static_cast<uint64_t>(id);
    if (seen >> id_bits_ == 0) return absl::OkStatus();
    for (size_t s = 0; s + 1 < splits.size(); ++s) {
      for (int64_t u = splits[s]; u < splits[s + 1]; ++u) {
        if (static_cast<uint64_t>(ids[u]) >> id_bits_ == 0) continue;
        const std::string table = s < segment_names_.size() ? absl::StrCat("table '", segment_names_[s], "'")
                                                            : absl::StrCat("segment ", s);
        return absl::InvalidArgumentError(absl::StrCat(
            "id ", ids[u], " of ", table, " does not fit the ", id_bits_, " bits that a merged key leaves for ids: ids ",
            "must lie in [0, 2^", id_bits_, "). Use key_encoding='hash', or hash the ids into that range."));
      }
    }
    return absl::OkStatus();
  }

  int64_t num_ranks_, id_bits_;
  Owner owner_;
  std::vector<std::string> segment_names_;
};

class UnpackMessageOp : public OpKernel {
 public:
  explicit UnpackMessageOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_segments", &num_segments_));
    OP_REQUIRES_OK(ctx, RequireIn("num_segments", num_segments_, 1, kMostSegments, "the number of tables."));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& message = ctx->input(0);
    const Tensor& splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("message", message, 1));
    OP_REQUIRES_OK(ctx, RequireRank("received_splits", splits, 1));
    OP_REQUIRES_OK(ctx, RequireSize("the size of the message", message.NumElements()));
    OP_REQUIRES_OK(ctx, CheckMessage(In<int64_t>(message), In<int32_t>(splits), num_segments_));

    const int64_t num_ids = message.NumElements() - splits.NumElements() * num_segments_;
    Tensor *ids, *segment_splits, *position, *id_splits;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({num_ids}), &ids));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({num_segments_ + 1}), &segment_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({num_ids}), &position));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(3, splits.shape(), &id_splits));

    UnpackMessage(In<int64_t>(message), In<int32_t>(splits), Out<int64_t>(ids), Out<int64_t>(segment_splits),
                  Out<int32_t>(position), Out<int32_t>(id_splits));
  }

 private:
  int64_t num_segments_;
};

REGISTER_KERNEL_BUILDER(Name("Fusedrec>RankPartition").Device(DEVICE_CPU), RankPartitionOp);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>UnpackMessage").Device(DEVICE_CPU), UnpackMessageOp);

}  // namespace fusedrec
