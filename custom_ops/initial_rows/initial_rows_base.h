// The common part of initial_rows's kernels: they read attributes, check inputs and allocate the output.
#pragma once

#include <string>
#include <vector>

#include "common/kernel_util.h"
#include "initial_rows/initial_rows.h"

namespace fusedrec {

class InitialRowsBase : public tensorflow::OpKernel {
 public:
  explicit InitialRowsBase(tensorflow::OpKernelConstruction* ctx) : tensorflow::OpKernel(ctx) {
    std::string distribution;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("seeds", &seeds_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("distribution", &distribution));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("a", &a_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("b", &b_));
    distribution_ = DistributionOf(distribution);
  }

 protected:
  // Checks the inputs. `out` is the buffer of rows where TensorFlow gives it: usually every row exists, and the buffer
  // passes through untouched.
  absl::Status Prepare(tensorflow::OpKernelContext* ctx, tensorflow::Tensor** out) const {
    const tensorflow::Tensor &rows = ctx->input(0), &exists = ctx->input(1), &ids = ctx->input(2);
    const tensorflow::Tensor& splits = ctx->input(3);
    TF_RETURN_IF_ERROR(RequireRank("rows", rows, 2));
    TF_RETURN_IF_ERROR(RequireRank("exists", exists, 1));
    TF_RETURN_IF_ERROR(RequireRank("ids", ids, 1));
    TF_RETURN_IF_ERROR(RequireRank("segment_splits", splits, 1));
    const int64_t num = ids.NumElements();
    TF_RETURN_IF_ERROR(RequireSplits("segment_splits", In<int64_t>(splits), num));
    if (exists.NumElements() != num || rows.dim_size(0) != num) {
      return absl::InvalidArgumentError(absl::StrCat("rows and exists must have one entry for each of the ", num,
                                                     " ids, got ", rows.dim_size(0), " and ", exists.NumElements(),
                                                     "."));
    }
    if (splits.NumElements() != static_cast<int64_t>(seeds_.size()) + 1) {
      return absl::InvalidArgumentError(absl::StrCat("segment_splits must have len(seeds) + 1 = ", seeds_.size() + 1,
                                                     " entries, got ", splits.NumElements(), "."));
    }
    return ctx->forward_input_or_allocate_output({0}, 0, rows.shape(), out);
  }

  std::vector<int64_t> seeds_;
  Distribution distribution_;
  float a_, b_;
};

}  // namespace fusedrec
