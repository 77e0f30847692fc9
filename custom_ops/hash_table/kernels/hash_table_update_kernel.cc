// Kernels of updates: gradients in, rows trained.
#include <algorithm>
#include <vector>

#include "hash_table/kernels/table_resource.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;

namespace {

// Checks inputs 1 to 4: handles, inverse, grads, scale. Gives the clock of the handles' lookup, 0 where none has a row.
absl::Status CheckGradients(OpKernelContext* ctx, const HashTable& table, uint32_t* clock) {
  const Tensor &handles = ctx->input(1), &inverse = ctx->input(2);
  TF_RETURN_IF_ERROR(RequireSize("the size of handles", handles.NumElements()));
  TF_RETURN_IF_ERROR(RequireSize("the size of inverse", inverse.NumElements()));
  TF_RETURN_IF_ERROR(CheckGradientShapes(ctx, table.spec().dim));
  const int64_t rows = handles.NumElements();
  for (const int32_t number : In<int32_t>(inverse)) {
    if (number < 0 || number >= rows) {
      return absl::InvalidArgumentError(absl::StrCat("inverse must lie in [0, ", rows, "), got ", number,
                                                     ". Take handles and inverse from one TableLookup."));
    }
  }
  uint32_t first = 0;
  uint64_t sum = 0;
  for (const int64_t handle : In<int64_t>(handles)) {
    if (handle == kNoRow) continue;
    if (handle < 0 || !table.IsHandle(handle & 0xffffffff)) {
      return absl::InvalidArgumentError(absl::StrCat("handles must be of a TableLookup of this table, got ", handle, "."));
    }
    const uint32_t of_handle = static_cast<uint32_t>(handle >> 32);
    if (of_handle == 0 || (first != 0 && of_handle != first)) {
      return absl::InvalidArgumentError(absl::StrCat("handles must be of one TableLookup, got some of lookup ", first,
                                                     " and some of lookup ", of_handle, "."));
    }
    first = of_handle;
    sum += Mix64(static_cast<uint32_t>(handle));
  }
  if (!table.AreHandlesOf(first, sum)) {  // only some of that lookup's, or some twice
    std::vector<int64_t> named;
    for (const int64_t handle : In<int64_t>(handles)) {
      if (handle != kNoRow) named.push_back(handle);
    }
    TF_RETURN_IF_ERROR(RequireDistinct("handles", named, "handles and inverse of one TableLookup."));
  }
  *clock = first;
  if (first == 0 || !table.IsStale(first)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "rows of training lookup ", first, " have been evicted, removed or moved by a later one before their gradients ",
      "came: updating them now would change other rows. Nothing was updated. Take gradients before the next training ",
      "lookup, and pass training=False to lookups that are not trained."));
}

absl::Status GiveLeftOut(OpKernelContext* ctx, const std::vector<int32_t>& numbers) {
  Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, tensorflow::TensorShape({static_cast<int64_t>(numbers.size())}), &out));
  std::copy(numbers.begin(), numbers.end(), out->flat<int32_t>().data());
  return absl::OkStatus();
}

template <typename T>
absl::Status ApplyGradients(OpKernelContext* ctx, HashTable* table) {
  Step step;
  uint32_t clock;
  TF_RETURN_IF_ERROR(CheckGradients(ctx, *table, &clock));
  TF_RETURN_IF_ERROR(ReadStep(ctx, 5, &step));
  std::vector<int32_t> left_out;
  table->Apply(In<int64_t>(ctx->input(1)), In<int32_t>(ctx->input(2)), ctx->input(3).data(), StorageFor<T>(),
               ctx->input(4).scalar<float>()(), step, CpuPool(ctx), clock, &left_out);
  return GiveLeftOut(ctx, left_out);
}

template <typename T>
absl::Status AccumulateGradients(OpKernelContext* ctx, HashTable* table) {
  uint32_t clock;
  bool begin;
  TF_RETURN_IF_ERROR(CheckGradients(ctx, *table, &clock));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 5, "begin", &begin));
  std::vector<int32_t> left_out;
  TF_RETURN_IF_ERROR(table->Accumulate(In<int64_t>(ctx->input(1)), In<int32_t>(ctx->input(2)), ctx->input(3).data(),
                                       StorageFor<T>(), ctx->input(4).scalar<float>()(), CpuPool(ctx), clock,
                                       &left_out, begin));
  return GiveLeftOut(ctx, left_out);
}

absl::Status ApplyAccumulated(OpKernelContext* ctx, HashTable* table) {
  Step step;
  TF_RETURN_IF_ERROR(ReadStep(ctx, 1, &step));
  table->ApplyAccumulated(step, CpuPool(ctx));
  return absl::OkStatus();
}

}  // namespace

REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableApplyAccumulated").Device(DEVICE_CPU), TableFunctionOp<ApplyAccumulated>);
#define FUSEDREC_REGISTER(T)                                                                                   \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableApplyGradients").Device(DEVICE_CPU).TypeConstraint<T>("T"),      \
                          TableFunctionOp<ApplyGradients<T>>);                                                 \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableAccumulateGradients").Device(DEVICE_CPU).TypeConstraint<T>("T"), \
                          TableFunctionOp<AccumulateGradients<T>>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
