#include <algorithm>
#include <vector>

#include "common/kernel_util.h"
#include "common/limits.h"
#include "recovery/bags.h"
#include "recovery/pooled.h"
#include "recovery/recovery.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

// Checks inputs `at` and `at` + 1, the bags of `num_ids` ids.
absl::Status RequireBags(OpKernelContext* ctx, int64_t num_ids, int at = 2) {
  TF_RETURN_IF_ERROR(RequireBagShapes(ctx->input(at), ctx->input(at + 1)));
  return RequireSplits("bag_splits", In<int64_t>(ctx->input(at)), num_ids);
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

}  // namespace

template <typename T>
class RecoverOp : public OpKernel {
 public:
  explicit RecoverOp(OpKernelConstruction* ctx) : OpKernel(ctx) { OP_REQUIRES_OK(ctx, ctx->GetAttr("pad", &pad_)); }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& rows = ctx->input(0);
    const Tensor& index = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("rows", rows, 2));
    OP_REQUIRES_OK(ctx, RequireRank("index", index, 1));
    OP_REQUIRES_OK(ctx, RequireSize("the size of index", index.NumElements()));
    OP_REQUIRES_OK(ctx, RequireIndex(In<int32_t>(index), rows.dim_size(0)));

    const int64_t dim = rows.dim_size(1);
    const int64_t out_rows = pad_ ? BucketedSize(index.NumElements()) : index.NumElements();
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({out_rows, dim}), &out));
    if (out->NumElements() == 0) return;
    Recover(static_cast<const char*>(rows.data()), dim * sizeof(T), In<int32_t>(index), CpuPool(ctx),
            static_cast<char*>(out->data()), out_rows);
  }

 private:
  bool pad_;
};

template <typename T>
class RecoverGradOp : public OpKernel {
 public:
  explicit RecoverGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("pad", &pad_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& grads = ctx->input(0);
    const Tensor& index = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("grads", grads, 2));
    OP_REQUIRES_OK(ctx, RequireRank("index", index, 1));
    OP_REQUIRES_OK(ctx, RequireSize("the size of index", index.NumElements()));
    int64_t rows = 0, out_rows = 0;
    OP_REQUIRES_OK(ctx, ReadNumRows(ctx->input(2), pad_, &rows, &out_rows));
    OP_REQUIRES(ctx, grads.dim_size(0) >= index.NumElements(),
                absl::InvalidArgumentError(absl::StrCat("grads must have a row for each of the ", index.NumElements(),
                                                        " entries of index, got ", grads.dim_size(0),
                                                        ". Pass the gradient of Recover's output.")));
    OP_REQUIRES_OK(ctx, RequireIndex(In<int32_t>(index), rows));

    const int64_t dim = grads.dim_size(1);
    Tensor *out, begin;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({out_rows, dim}), &out));
    if (out->NumElements() == 0) return;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT32, TensorShape({out_rows + 2}), &begin));
    RecoverGrad(grads.flat<T>().data(), dim, In<int32_t>(index), CpuPool(ctx), begin.flat<int32_t>().data(),
                out->flat<T>().data(), out_rows);
  }

 private:
  bool pad_;
};

template <typename T>
class PooledRecoverOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &rows = ctx->input(0), &index = ctx->input(1), &scale = ctx->input(3);
    OP_REQUIRES_OK(ctx, RequireRank("rows", rows, 2));
    OP_REQUIRES_OK(ctx, RequireRank("index", index, 1));
    OP_REQUIRES_OK(ctx, RequireSize("the size of index", index.NumElements()));
    OP_REQUIRES_OK(ctx, RequireIndex(In<int32_t>(index), rows.dim_size(0)));
    OP_REQUIRES_OK(ctx, RequireBags(ctx, index.NumElements()));
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({scale.NumElements(), rows.dim_size(1)}), &out));
    PooledRecover(rows.flat<T>().data(), rows.dim_size(1), In<int32_t>(index), In<int64_t>(ctx->input(2)),
                  In<float>(scale), CpuPool(ctx), out->flat<T>().data());
  }
};

template <typename T>
class PooledRecoverPartsOp : public OpKernel {
 public:
  explicit PooledRecoverPartsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("pad", &pad_));
  }

  void Compute(OpKernelContext* ctx) override {
    tensorflow::OpInputList parts;
    OP_REQUIRES_OK(ctx, ctx->input_list("rows", &parts));
    const Tensor &index = ctx->input(parts.size()), &splits = ctx->input(parts.size() + 1);
    const Tensor& scale = ctx->input(parts.size() + 2);
    int64_t rows;
    OP_REQUIRES_OK(ctx, RequireParts(parts, &rows));
    OP_REQUIRES_OK(ctx, RequireRank("index", index, 1));
    OP_REQUIRES_OK(ctx, RequireSize("the size of index", index.NumElements()));
    OP_REQUIRES_OK(ctx, RequireIndex(In<int32_t>(index), rows));
    OP_REQUIRES_OK(ctx, RequireBags(ctx, index.NumElements(), parts.size() + 1));
    const int64_t bags = scale.NumElements(), dim = parts[0].dim_size(1);
    const int64_t out_rows = pad_ ? BucketedSize(bags) : bags;
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({out_rows, dim}), &out));
    PooledRecoverParts<T>(RowsOfParts<T>(parts, In<int32_t>(index), dim), dim, In<int64_t>(splits), In<float>(scale),
                          CpuPool(ctx), out->flat<T>().data(), out_rows);
  }

 private:
  bool pad_;
};

template <typename T>
class PooledRecoverGradOp : public OpKernel {
 public:
  explicit PooledRecoverGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("pad", &pad_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &grads = ctx->input(0), &index = ctx->input(1), &scale = ctx->input(3);
    OP_REQUIRES_OK(ctx, RequireRank("grads", grads, 2));
    OP_REQUIRES_OK(ctx, RequireRank("index", index, 1));
    OP_REQUIRES_OK(ctx, RequireSize("the size of index", index.NumElements()));
    OP_REQUIRES_OK(ctx, RequireSize("the size of bag_scale", scale.NumElements()));
    OP_REQUIRES_OK(ctx, RequireBags(ctx, index.NumElements()));
    OP_REQUIRES(ctx, grads.dim_size(0) == scale.NumElements(),
                absl::InvalidArgumentError(absl::StrCat("grads must have a row for each of the ", scale.NumElements(),
                                                        " bags, got ", grads.dim_size(0),
                                                        ". Pass the gradient of PooledRecover's output.")));
    int64_t rows = 0, out_rows = 0;
    OP_REQUIRES_OK(ctx, ReadNumRows(ctx->input(4), pad_, &rows, &out_rows));
    OP_REQUIRES_OK(ctx, RequireIndex(In<int32_t>(index), rows));
    Tensor *out, begin;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({out_rows, grads.dim_size(1)}), &out));
    if (out->NumElements() == 0) return;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT32, TensorShape({out_rows + 2}), &begin));
    PooledRecoverGrad(grads.flat<T>().data(), grads.dim_size(1), In<int32_t>(index), In<int64_t>(ctx->input(2)),
                      In<float>(scale), CpuPool(ctx), begin.flat<int32_t>().data(), out->flat<T>().data(), out_rows);
  }

 private:
  bool pad_;
};

#define FUSEDREC_REGISTER(T)                                                                                          \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>Recover").Device(DEVICE_CPU).TypeConstraint<T>("T"), RecoverOp<T>);         \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>RecoverGrad").Device(DEVICE_CPU).TypeConstraint<T>("T"), RecoverGradOp<T>); \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>PooledRecover").Device(DEVICE_CPU).TypeConstraint<T>("T"),                  \
                          PooledRecoverOp<T>);                                                                        \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>PooledRecoverParts").Device(DEVICE_CPU).TypeConstraint<T>("T"),             \
                          PooledRecoverPartsOp<T>);                                                                   \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>PooledRecoverGrad").Device(DEVICE_CPU).TypeConstraint<T>("T"),              \
                          PooledRecoverGradOp<T>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
