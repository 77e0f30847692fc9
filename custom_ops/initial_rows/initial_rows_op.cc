#include "common/gpu_kernel_util.h"
#include "common/shapes.h"
#include "initial_rows/initial_rows.h"
#include "initial_rows/initial_rows_cuda.h"

namespace fusedrec {

REGISTER_OP("Fusedrec>InitialRows")
    .Input("rows: T").Input("exists: bool").Input("ids: int64").Input("segment_splits: int64")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}").Attr("seeds: list(int) >= 1")
    .Attr("distribution: {'constant', 'uniform', 'normal', 'truncated_normal'}").Attr("a: float").Attr("b: float = 0.0")
    .SetShapeFn(Shapes("[w,d] [w] [w] [s] -> [w,d]"))
    .Doc("Fills the rows that a table lacks with their initial values, a pure function of (table seed, id, column).");

template <On kOn, typename T>
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
    const Tensor &rows = ctx->input(0), &exists = ctx->input(1), &ids = ctx->input(2), &splits = ctx->input(3);
    OP_REQUIRES_OK(ctx, RequireRank("rows", rows, 2));
    OP_REQUIRES_OK(ctx, RequireRank("exists", exists, 1));
    OP_REQUIRES_OK(ctx, RequireRank("ids", ids, 1));
    OP_REQUIRES_OK(ctx, RequireRank("segment_splits", splits, 1));
    const int64_t num = ids.NumElements(), dim = rows.dim_size(1), tables = seeds_.size();
    OP_REQUIRES_OK(ctx, RequireSplits("segment_splits", In<int64_t>(splits), num));
    OP_REQUIRES_OK(ctx, RequireSize("the number of ids", num));
    OP_REQUIRES_OK(ctx, RequireSize("the columns of rows", dim));
    OP_REQUIRES(ctx, exists.NumElements() == num && rows.dim_size(0) == num,
        Invalid("rows and exists must have one entry for each of the ", num, " ids, got ", rows.dim_size(0), " and ",
            exists.NumElements(), "."));
    OP_REQUIRES(ctx, splits.NumElements() == tables + 1,
        Invalid("segment_splits must have len(seeds) + 1 = ", tables + 1, " entries, got ", splits.NumElements(), "."));
    // The buffer of rows where TensorFlow gives it: usually every row exists, and the buffer passes through untouched.
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({0}, 0, rows.shape(), &out));
    if constexpr (kOn == On::kGpu) {
      Gpu gpu(ctx);
      OP_REQUIRES_OK(
          ctx, gpu.Check("initial_rows",
                   fusedrec_initial_rows(NumberTypeOf<T>(), rows.data(), static_cast<const uint8_t*>(exists.data()),
                       In<int64_t>(ids).data(), In<int64_t>(splits).data(), seeds_.data(), num, tables, dim,
                       static_cast<int>(distribution_), a_, b_, &gpu.memory, out->data(), gpu.stream)));
    } else {
      if (!out->SharesBufferWith(rows)) out->flat<T>() = rows.flat<T>();
      const bool* is_there = exists.flat<bool>().data();
      for (size_t s = 0; s < seeds_.size(); ++s) {
        const int64_t base = splits.flat<int64_t>()(s), size = splits.flat<int64_t>()(s + 1) - base;
        CpuPool(ctx)(size, 4 + 2 * dim, [&](int64_t begin, int64_t end) {
          std::vector<float> row(dim);
          for (int64_t w = base + begin; w < base + end; ++w) {
            if (is_there[w]) continue;
            InitialRow(distribution_, a_, b_, seeds_[s], ids.flat<int64_t>()(w), absl::MakeSpan(row));
            T* to = out->flat<T>().data() + w * dim;
            for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<T>(row[d]);
          }
        });
      }
    }
  }

 private:
  std::vector<int64_t> seeds_;
  Distribution distribution_;
  float a_, b_;
};

FUSEDREC_KERNEL_OF_ROWS("InitialRows", InitialRowsOp, .HostMemory("segment_splits"));

}  // namespace fusedrec
