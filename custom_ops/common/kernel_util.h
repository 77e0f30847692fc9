// Helpers of every OpKernel: TensorFlow's thread pool as a ParallelFor, checks whose messages name the argument, its
// value, the wanted value and the remedy, and registration.
//
// A kernel for both devices is a class template of On. It reads and checks its inputs once; only the calls of the
// algorithm and of the launcher differ, under `if constexpr`.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "common/limits.h"
#include "common/parallel.h"
#include "common/tf_compat.h"
#include "common/try.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace fusedrec {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

enum class On { kCpu, kGpu };

inline ParallelFor CpuPool(OpKernelContext* ctx) {
  auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
  return [pool](int64_t total, int64_t unit_cost, const std::function<void(int64_t, int64_t)>& body) {
    if (total > 0) pool->ParallelFor(total, BlocksByCost<tensorflow::thread::ThreadPool>(unit_cost, 0), body);
  };
}

template <typename T>
absl::Span<const T> In(const Tensor& t) {
  return {t.flat<T>().data(), static_cast<size_t>(t.NumElements())};
}

template <typename T>
absl::Span<T> Out(Tensor* t) {
  return {t->flat<T>().data(), static_cast<size_t>(t->NumElements())};
}

inline absl::Status RequireRank(const char* name, const Tensor& t, int rank) {
  if (t.dims() == rank) return absl::OkStatus();
  return Invalid(
      name, " must have rank ", rank, ", got shape ", t.shape().DebugString(), ". Reshape it before the call.");
}

template <typename T>
absl::Status ScalarInput(OpKernelContext* ctx, int index, const char* name, T* value) {
  const absl::Status ranked = RequireRank(name, ctx->input(index), 0);
  if (ranked.ok()) *value = ctx->input(index).scalar<T>()();
  return ranked;
}

inline absl::Status ReadVectors(OpKernelContext* ctx, const char* name, OpInputList* list) {
  FUSEDREC_TRY(ctx->input_list(name, list));
  for (int i = 0; i < list->size(); ++i) {
    FUSEDREC_TRY(RequireRank(absl::StrCat(name, "[", i, "]").c_str(), (*list)[i], 1));
  }
  return absl::OkStatus();
}

// Copies `values` into a new output, of this shape or a vector.
template <typename T>
absl::Status Give(OpKernelContext* ctx, int index, const std::vector<T>& values, const TensorShape& shape) {
  Tensor* out;
  FUSEDREC_TRY(ctx->allocate_output(index, shape, &out));
  std::copy(values.begin(), values.end(), Out<T>(out).begin());
  return absl::OkStatus();
}
template <typename T>
absl::Status Give(OpKernelContext* ctx, int index, const std::vector<T>& values) {
  return Give(ctx, index, values, TensorShape({static_cast<int64_t>(values.size())}));
}

// Checks that `splits` runs from 0 to `total` without decreasing and has at least one entry.
inline absl::Status RequireSplits(const char* name, absl::Span<const int64_t> splits, int64_t total) {
  const std::string remedy = ". Build it from the lengths of the segments with a cumulative sum that starts at 0.";
  if (splits.empty()) {
    return Invalid(name, " must have at least one entry, got none", remedy);
  }
  if (splits.front() != 0 || splits.back() != total) {
    return Invalid(
        name, " must run from 0 to ", total, ", got first ", splits.front(), ", last ", splits.back(), remedy);
  }
  for (size_t s = 1; s < splits.size(); ++s) {
    if (splits[s] < splits[s - 1]) {
      return Invalid(name, " must not decrease, got ", splits[s - 1], " then ", splits[s], " at entry ", s, remedy);
    }
  }
  return absl::OkStatus();
}

}  // namespace fusedrec

// Registrations. `op` is the name after "Fusedrec>", `host` a chain of .HostMemory("argument") on a GPU. tests/cuda has its own
// form of the next two, which registers the GPU form over the emulation.
#define FUSEDREC_CPU_KERNEL(builder, ...) REGISTER_KERNEL_BUILDER(builder.Device(tensorflow::DEVICE_CPU), __VA_ARGS__)
#ifdef FUSEDREC_CUDA
#define FUSEDREC_GPU_KERNEL(builder, ...) REGISTER_KERNEL_BUILDER(builder, __VA_ARGS__)
#else
#define FUSEDREC_GPU_KERNEL(builder, ...) static_assert(true, "the library has no GPU form")
#endif

#define FUSEDREC_KERNEL_ON_BOTH(op, Kernel, host)                      \
  FUSEDREC_CPU_KERNEL(Name("Fusedrec>" op), Kernel<On::kCpu>); \
  FUSEDREC_GPU_KERNEL(Name("Fusedrec>" op).Device(tensorflow::DEVICE_GPU) host, Kernel<On::kGpu>)
#define FUSEDREC_KERNEL_OF_ROWS(op, Kernel, host)         \
  FUSEDREC_KERNEL_OF_TYPE(op, Kernel, float, host);       \
  FUSEDREC_KERNEL_OF_TYPE(op, Kernel, Eigen::half, host); \
  FUSEDREC_KERNEL_OF_TYPE(op, Kernel, Eigen::bfloat16, host)
#define FUSEDREC_KERNEL_OF_TYPE(op, Kernel, T, host)                                                   \
  FUSEDREC_CPU_KERNEL(Name("Fusedrec>" op).TypeConstraint<T>("T"), Kernel<On::kCpu, T>);               \
  FUSEDREC_GPU_KERNEL(Name("Fusedrec>" op).Device(tensorflow::DEVICE_GPU).TypeConstraint<T>("T") host, \
                      Kernel<On::kGpu, T>)
// A class that computes in host memory, for models on a GPU as well.
#define FUSEDREC_KERNEL_ON_HOST(op, Kernel, host)                                       \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>" op).Device(tensorflow::DEVICE_CPU), Kernel); \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>" op).Device(tensorflow::DEVICE_GPU) host, Kernel)
