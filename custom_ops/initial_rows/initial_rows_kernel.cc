#include <string>
#include <vector>

#include "common/kernel_util.h"
#include "initial_rows/initial_rows.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

template <typename T>
class InitialRowsOp : public OpKernel {
 public:
  explicit InitialRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string distribution;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("seeds", &seeds_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("distribution", &distribution));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("a", &a_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("b", &b_));
    distribution_ = DistributionOf(distribution);
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& rows = ctx->input(0);
    const Tensor& exists = ctx->input(1);
    const Tensor& ids = ctx->input(2);
    const Tensor& splits = ctx->input(3);
    OP_REQUIRES_OK(ctx, RequireRank("rows", rows, 2));
    OP_REQUIRES_OK(ctx, RequireRank("exists", exists, 1));
    OP_REQUIRES_OK(ctx, RequireRank("ids", ids, 1));
    OP_REQUIRES_OK(ctx, RequireRank("segment_splits", splits, 1));
    OP_REQUIRES_OK(ctx, RequireSplits("segment_splits", In<int64_t>(splits), ids.NumElements()));
    const int64_t num = ids.NumElements();
    OP_REQUIRES(ctx, exists.NumElements() == num && rows.dim_size(0) == num,
                absl::InvalidArgumentError(absl::StrCat("rows and exists must have one entry for each of the ", num,
                                                        " ids, got ", rows.dim_size(0), " and ",
                                                        exists.NumElements(), ".")));
    OP_REQUIRES(ctx, splits.NumElements() == static_cast<int64_t>(seeds_.size()) + 1,
                absl::InvalidArgumentError(absl::StrCat("segment_splits must have len(seeds) + 1 = ", seeds_.size() + 1,
                                                        " entries, got ", splits.NumElements(), ".")));

    // Usually every row exists and the buffer passes through untouched.
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({0}, 0, rows.shape(), &out));
    if (!out->SharesBufferWith(rows)) out->flat<T>() = rows.flat<T>();
    const bool* found = exists.flat<bool>().data();
    const int64_t dim = rows.dim_size(1);
    for (size_t s = 0; s < seeds_.size(); ++s) {
      const int64_t base = splits.flat<int64_t>()(s), size = splits.flat<int64_t>()(s + 1) - base;
      CpuPool(ctx)(size, 4 + 2 * dim, [&](int64_t begin, int64_t end) {
        std::vector<float> row(dim);
        for (int64_t w = base + begin; w < base + end; ++w) {
          if (found[w]) continue;
          InitialRow(distribution_, a_, b_, seeds_[s], ids.flat<int64_t>()(w), absl::MakeSpan(row));
          T* to = out->flat<T>().data() + w * dim;
          for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<T>(row[d]);
        }
      });
    }
  }

 private:
  std::vector<int64_t> seeds_;
  Distribution distribution_;
  float a_, b_;
};

// The GPU kernel works in host memory, where tables of other projects have their rows. The table on a device makes its
// own initial rows.
#define FUSEDREC_REGISTER(T)                                                                                          \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>InitialRows").Device(DEVICE_CPU).TypeConstraint<T>("T"), InitialRowsOp<T>); \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>InitialRows")                                                                \
                              .Device(tensorflow::DEVICE_GPU)                                                         \
                              .TypeConstraint<T>("T")                                                                 \
                              .HostMemory("rows")                                                                     \
                              .HostMemory("exists")                                                                   \
                              .HostMemory("ids")                                                                      \
                              .HostMemory("segment_splits")                                                           \
                              .HostMemory("out"),                                                                     \
                          InitialRowsOp<T>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
