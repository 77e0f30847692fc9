#include "common/bucket.h"
#include "common/gpu_kernel_util.h"
#include "common/shapes.h"
#include "rank_partition/rank_partition.h"
#include "rank_partition/rank_partition_cuda.h"

namespace fusedrec {

// The message has at least U + R * S entries, padded to a bucketed size.
REGISTER_OP("Fusedrec>RankPartition")
    .Input("unique_ids: int64").Input("unique_splits: int64")
    .Output("message: int64").Output("send_splits: int32").Output("id_splits: int32").Output("restore: int32")
    .Attr("num_ranks: int >= 1").Attr("owner: {'hash_range', 'tfra'} = 'hash_range'").Attr("id_bits: int >= 1 = 64")
    .Attr("segment_names: list(string) = []")
    .SetShapeFn(Shapes("[u] [s] -> [?] [num_ranks] [num_ranks] [u]"))
    .Doc("Packs unique ids into one message per owner rank (FusedRec, section 3, 'Embedding Route').");

REGISTER_OP("Fusedrec>UnpackMessage")
    .Input("message: int64").Input("received_splits: int32")
    .Output("ids: int64").Output("segment_splits: int64").Output("position: int32").Output("id_splits: int32")
    .Attr("num_segments: int >= 1")
    .SetShapeFn(Shapes("[p] [r] -> [?] [num_segments+1] [?] [r]"))
    .Doc("Reads the messages of RankPartition at the owner: ids of all sources, sorted by segment.");

template <On kOn>
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
    const Tensor &ids = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("unique_ids", ids, 1));
    OP_REQUIRES_OK(ctx, RequireRank("unique_splits", splits, 1));
    OP_REQUIRES_OK(ctx, RequireSplits("unique_splits", In<int64_t>(splits), ids.NumElements()));
    const int64_t num_ids = ids.NumElements(), segments = splits.NumElements() - 1;
    OP_REQUIRES_OK(ctx, RequireIn("the size of unique_splits", segments + 1, 1, kMostSegments + 1, "fewer tables."));
    const int64_t padded = BucketedSize(num_ids + num_ranks_ * segments);
    OP_REQUIRES_OK(ctx, RequireIn("the size of the message", padded, 0, kMostPositions,
                                  "smaller batches, or fewer tables."));
    if (kOn == On::kCpu) OP_REQUIRES_OK(ctx, RequireIdsFit(In<int64_t>(ids), 0, In<int64_t>(splits)));
    Tensor *message, *send_splits, *id_splits, *restore;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({padded}), &message));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({num_ranks_}), &send_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({num_ranks_}), &id_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(3, ids.shape(), &restore));
    if constexpr (kOn == On::kGpu) {
      // Waits once, for the counts: the host calls the collective, so it must know the sizes.
      Gpu gpu(ctx);
      std::vector<int32_t> counts(num_ranks_ + 1);
      OP_REQUIRES_OK(ctx, gpu.Check("rank_partition",
                                    fusedrec_rank_partition(In<int64_t>(ids).data(), In<int64_t>(splits).data(),
                                                            num_ids, segments, num_ranks_, owner_ == Owner::kTfra,
                                                            id_bits_, &gpu.memory, Out<int64_t>(message).data(), padded,
                                                            counts.data(), Out<int32_t>(restore).data(), gpu.stream)));
      if (const int32_t misfit = counts[num_ranks_]; misfit >= 0) {
        std::vector<int64_t> id;  // the message quotes it
        OP_REQUIRES_OK(ctx, gpu.CopyToHost(ids.Slice(misfit, misfit + 1), &id));
        OP_REQUIRES_OK(ctx, RequireIdsFit(id, misfit, In<int64_t>(splits)));
      }
      for (int64_t r = 0; r < num_ranks_; ++r) {
        Out<int32_t>(id_splits)[r] = counts[r];
        Out<int32_t>(send_splits)[r] = counts[r] + static_cast<int32_t>(segments);
      }
    } else {
      RankPartition(In<int64_t>(ids), In<int64_t>(splits), owner_, CpuPool(ctx), Out<int64_t>(message),
                    Out<int32_t>(send_splits), Out<int32_t>(id_splits), Out<int32_t>(restore));
    }
  }

 private:
  // The bits above id_bits name the table in a merged key (MTGRBoost eq. 8): an id that reaches into them would be
  // another table's row. ids: those from position `first` on.
  absl::Status RequireIdsFit(absl::Span<const int64_t> ids, int64_t first, absl::Span<const int64_t> splits) const {
    if (id_bits_ >= 64) return absl::OkStatus();
    uint64_t bits = 0;
    for (const int64_t id : ids) bits |= static_cast<uint64_t>(id);
    if (bits >> id_bits_ == 0) return absl::OkStatus();
    size_t u = 0, s = 0;
    while (static_cast<uint64_t>(ids[u]) >> id_bits_ == 0) ++u;
    while (splits[s + 1] <= first + static_cast<int64_t>(u)) ++s;
    const std::string table =
        s < segment_names_.size() ? absl::StrCat("table '", segment_names_[s], "'") : absl::StrCat("segment ", s);
    return Invalid("id ", ids[u], " of ", table, " does not fit the ", id_bits_,
        " bits that a merged key leaves for ids: ids must ", "lie in [0, 2^", id_bits_,
        "). Use key_encoding='hash', or hash the ids into that range.");
  }

  int64_t num_ranks_, id_bits_;
  Owner owner_;
  std::vector<std::string> segment_names_;
};

template <On kOn>
class UnpackMessageOp : public OpKernel {
 public:
  explicit UnpackMessageOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_segments", &num_segments_));
    OP_REQUIRES_OK(ctx, RequireIn("num_segments", num_segments_, 1, kMostSegments, "the number of tables."));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("message", message, 1));
    OP_REQUIRES_OK(ctx, RequireRank("received_splits", splits, 1));
    OP_REQUIRES_OK(ctx, RequireSize("the size of the message", message.NumElements()));
    const absl::Span<const int64_t> entries = In<int64_t>(message);
    const absl::Span<const int32_t> blocks = In<int32_t>(splits);
    const int64_t ranks = blocks.size(), num_ids = message.NumElements() - ranks * num_segments_;
    [[maybe_unused]] std::vector<int64_t> headers;  // on a GPU
    if constexpr (kOn == On::kGpu) {
      // Waits once, for the headers.
      OP_REQUIRES_OK(ctx, CheckReceivedSplits(entries.size(), blocks, num_segments_));
      headers.resize(ranks * num_segments_);  // at most the entries, as checked
      Gpu gpu(ctx);
      OP_REQUIRES_OK(ctx, gpu.Check("message_headers",
                                    fusedrec_message_headers(entries.data(), blocks.data(), num_segments_, ranks,
                                                             &gpu.memory, headers.data(), gpu.stream)));
      for (int64_t r = 0; r < ranks; ++r) {
        OP_REQUIRES_OK(ctx, CheckHeader(r, {&headers[r * num_segments_], static_cast<size_t>(num_segments_)},
                                        blocks[r] - num_segments_));
      }
    } else {
      OP_REQUIRES_OK(ctx, CheckMessage(entries, blocks, num_segments_));
    }
    Tensor *ids, *segment_splits, *position, *id_splits;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({num_ids}), &ids));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({num_segments_ + 1}), &segment_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({num_ids}), &position));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(3, splits.shape(), &id_splits));
    if constexpr (kOn == On::kGpu) {
      Gpu gpu(ctx);
      OP_REQUIRES_OK(ctx,
          gpu.Check("unpack_message", fusedrec_unpack_message(entries.data(), headers.data(), num_segments_, ranks,
                                          &gpu.memory, Out<int64_t>(ids).data(), Out<int64_t>(segment_splits).data(),
                                          Out<int32_t>(position).data(), Out<int32_t>(id_splits).data(), gpu.stream)));
    } else {
      UnpackMessage(entries, blocks, Out<int64_t>(ids), Out<int64_t>(segment_splits), Out<int32_t>(position),
                    Out<int32_t>(id_splits));
    }
  }

 private:
  int64_t num_segments_;
};

FUSEDREC_KERNEL_ON_BOTH("RankPartition", RankPartitionOp,
                .HostMemory("unique_splits").HostMemory("send_splits").HostMemory("id_splits"));
FUSEDREC_KERNEL_ON_BOTH("UnpackMessage", UnpackMessageOp,
                .HostMemory("received_splits").HostMemory("segment_splits").HostMemory("id_splits"));

}  // namespace fusedrec
