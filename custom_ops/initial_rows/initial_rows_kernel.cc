#include <vector>

#include "initial_rows/initial_rows_base.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

template <typename T>
class InitialRowsOp : public InitialRowsBase {
 public:
  using InitialRowsBase::InitialRowsBase;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &rows = ctx->input(0), &ids = ctx->input(2), &splits = ctx->input(3);
    Tensor* out;
    OP_REQUIRES_OK(ctx, Prepare(ctx, &out));
    if (!out->SharesBufferWith(rows)) out->flat<T>() = rows.flat<T>();
    const bool* found = ctx->input(1).flat<bool>().data();
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
};

#define FUSEDREC_REGISTER(T) \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>InitialRows").Device(DEVICE_CPU).TypeConstraint<T>("T"), InitialRowsOp<T>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
