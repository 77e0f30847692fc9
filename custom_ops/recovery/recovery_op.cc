#include "common/bucket.h"
#include "common/gpu_kernel_util.h"
#include "common/shapes.h"
#include "recovery/recovery.h"
#include "recovery/recovery_cuda.h"

namespace fusedrec {

REGISTER_OP("Fusedrec>Recover")
    .Input("rows: T").Input("index: int32")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}").Attr("pad: bool = false")
    .SetShapeFn(Shapes("[p,d] [n] -> [n unless pad,d]"))
    .Doc("Gathers rows: out[n] = rows[index[n]] (FusedRec, section 3, 'Embedding Recovery').");

REGISTER_OP("Fusedrec>RecoverGrad")
    .Input("grads: T").Input("index: int32").Input("num_rows: int64")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}").Attr("pad: bool = false")
    .SetShapeFn(Shapes("[p,d] [n] =num_rows -> [num_rows unless pad,d]"))
    .Doc("Gradient of Recover, deterministic: sums in the order of the occurrences.");

REGISTER_OP("Fusedrec>PooledRecover")
    .Input("rows: T").Input("index: int32").Input("bag_splits: int64").Input("bag_scale: float")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn(Shapes("[p,d] [n] [b] [g] -> [g,d]"))
    .Doc("Gathers rows and pools them by bag.");

REGISTER_OP("Fusedrec>PooledRecoverParts")
    .Input("rows: num_parts * T").Input("index: int32").Input("bag_splits: int64").Input("bag_scale: float")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}").Attr("num_parts: int >= 1").Attr("pad: bool = false")
    .SetShapeFn(Shapes("num_parts*[p,d] [n] [b] [g] -> [g unless pad,d]"))
    .Doc("PooledRecover from rows in several parts.");

REGISTER_OP("Fusedrec>PooledRecoverGrad")
    .Input("grads: T").Input("index: int32").Input("bag_splits: int64").Input("bag_scale: float")
    .Input("num_rows: int64")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}").Attr("pad: bool = false")
    .SetShapeFn(Shapes("[g,d] [n] [b] [g] =num_rows -> [num_rows unless pad,d]"))
    .Doc("Gradient of PooledRecover, deterministic: sums in the order of the occurrences.");

namespace {

absl::Status RequireVector(const char* name, const Tensor& t) {
  FUSEDREC_TRY(RequireRank(name, t, 1));
  return RequireSize(absl::StrCat("the size of ", name).c_str(), t.NumElements());
}

// index: in host memory.
absl::Status RequireIndex(absl::Span<const int32_t> index, int64_t rows) {
  const int64_t bad = FirstOutOfRange(index, rows);
  if (bad < 0) return absl::OkStatus();
  return Invalid("index[", bad, "] must lie in [0, ", rows, "), got ", index[bad],
      ". Compose it from the outputs of SegmentUnique and RankPartition.");
}

// Rows in a tensor, or in a list of parts; *rows: of all.
absl::Status RequireParts(const OpInputList& parts, bool is_list, int64_t* rows) {
  *rows = 0;
  for (int i = 0; i < parts.size(); ++i) {
    FUSEDREC_TRY(RequireRank(is_list ? absl::StrCat("rows[", i, "]").c_str() : "rows", parts[i], 2));
    if (parts[i].dim_size(1) != parts[0].dim_size(1)) {
      return Invalid("rows[", i, "] must have the ", parts[0].dim_size(1), " columns of rows[0], got ",
          parts[i].dim_size(1), ". Pass parts of the same rows.");
    }
    *rows += parts[i].dim_size(0);
  }
  return RequireSize("the number of rows", *rows);
}

// bag_splits [G + 1], whose values are checked on a CPU, and bag_scale [G].
absl::Status RequireBags(const Tensor& splits, const Tensor& scale, int64_t num_ids, On on) {
  FUSEDREC_TRY(RequireRank("bag_splits", splits, 1));
  FUSEDREC_TRY(RequireVector("bag_scale", scale));
  if (splits.NumElements() == 0) {
    return Invalid("bag_splits must have at least one entry, got none. It begins with 0.");
  }
  if (scale.NumElements() + 1 != splits.NumElements()) {
    return Invalid("bag_scale must have one entry for each of the ", splits.NumElements() - 1, " bags, got ",
        scale.NumElements(), ".");
  }
  return on == On::kCpu ? RequireSplits("bag_splits", In<int64_t>(splits), num_ids) : absl::OkStatus();
}

// The row of each id in parts of `columns` columns.
template <typename T>
std::vector<const T*> RowsOfParts(const tensorflow::OpInputList& parts, absl::Span<const int32_t> index,
                                  int64_t columns) {
  std::vector<int64_t> ends;  // of each part
  for (const Tensor& part : parts) ends.push_back((ends.empty() ? 0 : ends.back()) + part.dim_size(0));
  std::vector<const T*> rows;
  rows.reserve(index.size());
  for (const int32_t row : index) {
    const size_t part = std::upper_bound(ends.begin(), ends.end(), row) - ends.begin();
    rows.push_back(parts[part].flat<T>().data() + (row - (part ? ends[part - 1] : 0)) * columns);
  }
  return rows;
}

// Answer of a launcher of the pooled forms as a Status. The checks of the CPU look for the refused bag or index, and
// inputs come to the host only for that. at: number of the input `index`, before bag_splits.
absl::Status PooledStatus(const Gpu& gpu, OpKernelContext* ctx, const char* launcher, int answer, int64_t num_rows,
                          int at = 1) {
  if (answer == kCudaInvalidValue) {
    std::vector<int32_t> index;
    std::vector<int64_t> splits;
    FUSEDREC_TRY(gpu.CopyToHost(ctx->input(at), &index));
    FUSEDREC_TRY(gpu.CopyToHost(ctx->input(at + 1), &splits));
    FUSEDREC_TRY(RequireIndex(index, num_rows));
    FUSEDREC_TRY(RequireSplits("bag_splits", splits, index.size()));
  }
  return gpu.Check(launcher, answer);
}

// An op with or without rows of zeros after its output; PooledRecover has no attribute for them.
class PaddedOp : public OpKernel {
 public:
  explicit PaddedOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    if (ctx->HasAttr("pad")) OP_REQUIRES_OK(ctx, ctx->GetAttr("pad", &pad_));
  }

 protected:
  int64_t Padded(int64_t rows) const { return pad_ ? BucketedSize(rows) : rows; }

 private:
  bool pad_ = false;
};

}  // namespace

// On a GPU, an index out of range is not reported (recovery_cuda.h).
template <On kOn, typename T>
class RecoverOp : public PaddedOp {
 public:
  using PaddedOp::PaddedOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &rows = ctx->input(0), &index = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("rows", rows, 2));
    OP_REQUIRES_OK(ctx, RequireVector("index", index));
    if (kOn == On::kCpu) OP_REQUIRES_OK(ctx, RequireIndex(In<int32_t>(index), rows.dim_size(0)));
    const int64_t num = index.NumElements(), dim = rows.dim_size(1), out_rows = Padded(num);
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({out_rows, dim}), &out));
    if (out->NumElements() == 0) return;
    if constexpr (kOn == On::kGpu) {
      Gpu gpu(ctx);
      OP_REQUIRES_OK(ctx, gpu.Check("recover", fusedrec_recover(rows.data(), rows.dim_size(0), dim * sizeof(T),
                                                   In<int32_t>(index).data(), num, out->data(), out_rows, gpu.stream)));
    } else {
      Recover(static_cast<const char*>(rows.data()), dim * sizeof(T), In<int32_t>(index), CpuPool(ctx),
              static_cast<char*>(out->data()), out_rows);
    }
  }
};

// Inputs grads, index; pooled: bag_splits, bag_scale; num_rows.
template <On kOn, typename T, bool kPooled>
class GradOp : public PaddedOp {
 public:
  using PaddedOp::PaddedOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &grads = ctx->input(0), &index = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("grads", grads, 2));
    OP_REQUIRES_OK(ctx, RequireVector("index", index));
    const int64_t num = index.NumElements(), dim = grads.dim_size(1);
    absl::Span<const int64_t> splits;
    absl::Span<const float> scale;
    if constexpr (kPooled) {
      OP_REQUIRES_OK(ctx, RequireBags(ctx->input(2), ctx->input(3), num, kOn));
      splits = In<int64_t>(ctx->input(2));
      scale = In<float>(ctx->input(3));
      OP_REQUIRES(ctx, grads.dim_size(0) == static_cast<int64_t>(scale.size()),
          Invalid("grads must have a row for each of the ", scale.size(), " bags, got ", grads.dim_size(0),
              ". Pass the gradient of PooledRecover's output."));
    } else {
      OP_REQUIRES(ctx, grads.dim_size(0) >= num,
          Invalid("grads must have a row for each of the ", num, " entries of index, got ", grads.dim_size(0),
              ". Pass the gradient of Recover's output."));
    }
    int64_t rows = 0;
    OP_REQUIRES_OK(ctx, ScalarInput(ctx, kPooled ? 4 : 2, "num_rows", &rows));
    OP_REQUIRES_OK(ctx, RequireIn("num_rows", rows, 0, kMostPositions, "the number of rows that were read from."));
    const int64_t out_rows = Padded(rows);
    OP_REQUIRES_OK(ctx, RequireSize("num_rows, padded,", out_rows));
    if (kOn == On::kCpu) OP_REQUIRES_OK(ctx, RequireIndex(In<int32_t>(index), rows));
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({out_rows, dim}), &out));
    if (out->NumElements() == 0 && kOn == On::kCpu) return;
    if constexpr (kOn == On::kGpu) {
      Gpu gpu(ctx);
      const int answer = fusedrec_recover_grad(NumberTypeOf<T>(), grads.data(), dim, In<int32_t>(index).data(), num,
          splits.data(), scale.data(), scale.size(), &gpu.memory, out->data(), rows, out_rows, gpu.stream);
      OP_REQUIRES_OK(
          ctx, kPooled ? PooledStatus(gpu, ctx, "recover_grad", answer, rows) : gpu.Check("recover_grad", answer));
    } else {
      Tensor begin;
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT32, TensorShape({out_rows + 2}), &begin));
      PooledRecoverGrad(grads.flat<T>().data(), dim, In<int32_t>(index), splits, scale, CpuPool(ctx),
                        begin.flat<int32_t>().data(), out->flat<T>().data(), out_rows);
    }
  }
};
template <On kOn, typename T>
using RecoverGradOp = GradOp<kOn, T, false>;
template <On kOn, typename T>
using PooledRecoverGradOp = GradOp<kOn, T, true>;

// Rows in one tensor, or in a list. On a GPU, the pooled forms wait once, for whether the bags are sound.
template <On kOn, typename T>
class PooledRecoverOp : public PaddedOp {
 public:
  explicit PooledRecoverOp(OpKernelConstruction* ctx) : PaddedOp(ctx), in_parts_(ctx->HasAttr("num_parts")) {}

  void Compute(OpKernelContext* ctx) override {
    OpInputList parts;
    OP_REQUIRES_OK(ctx, ctx->input_list("rows", &parts));
    const int count = parts.size();
    const Tensor &index = ctx->input(count), &splits = ctx->input(count + 1), &scale = ctx->input(count + 2);
    int64_t rows;
    OP_REQUIRES_OK(ctx, RequireParts(parts, in_parts_, &rows));
    OP_REQUIRES_OK(ctx, RequireVector("index", index));
    if (kOn == On::kCpu) OP_REQUIRES_OK(ctx, RequireIndex(In<int32_t>(index), rows));
    OP_REQUIRES_OK(ctx, RequireBags(splits, scale, index.NumElements(), kOn));
    const int64_t bags = scale.NumElements(), dim = parts[0].dim_size(1), out_rows = Padded(bags);
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({out_rows, dim}), &out));
    if constexpr (kOn == On::kGpu) {
      Gpu gpu(ctx);
      std::vector<const void*> arrays;
      std::vector<int64_t> sizes;
      for (const Tensor& part : parts) {
        arrays.push_back(part.data());
        sizes.push_back(part.dim_size(0));
      }
      const int answer = fusedrec_pooled_recover(
          NumberTypeOf<T>(), arrays.data(), sizes.data(), count, dim, In<int32_t>(index).data(), index.NumElements(),
          In<int64_t>(splits).data(), In<float>(scale).data(), bags, &gpu.memory, out->data(), out_rows, gpu.stream);
      OP_REQUIRES_OK(ctx, PooledStatus(gpu, ctx, "pooled_recover", answer, rows, count));
    } else if (in_parts_) {
      PooledRecoverParts<T>(RowsOfParts<T>(parts, In<int32_t>(index), dim), dim, In<int64_t>(splits), In<float>(scale),
                            CpuPool(ctx), out->flat<T>().data(), out_rows);
    } else {
      PooledRecover(parts[0].flat<T>().data(), dim, In<int32_t>(index), In<int64_t>(splits), In<float>(scale),
                    CpuPool(ctx), out->flat<T>().data());
    }
  }

 private:
  const bool in_parts_;
};

FUSEDREC_KERNEL_OF_ROWS("Recover", RecoverOp, );
FUSEDREC_KERNEL_OF_ROWS("RecoverGrad", RecoverGradOp, .HostMemory("num_rows"));
FUSEDREC_KERNEL_OF_ROWS("PooledRecover", PooledRecoverOp, );
FUSEDREC_KERNEL_OF_ROWS("PooledRecoverParts", PooledRecoverOp, );
FUSEDREC_KERNEL_OF_ROWS("PooledRecoverGrad", PooledRecoverGradOp, .HostMemory("num_rows"));

}  // namespace fusedrec
