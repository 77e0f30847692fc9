// Helpers of the GPU kernels, which hold no device code: they check, allocate and call launchers (cuda_api.h).
//
// Arguments that are small and decide on sizes (splits, counts) are in host memory. They are checked as on a CPU, and
// no size waits for the device. Arrays of the size of a batch stay on the device.
#pragma once

#include <cstdint>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/cuda_api.h"
#include "common/kernel_util.h"
#include "common/limits.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "xla/stream_executor/stream.h"

namespace fusedrec {

// The cudaStream_t of this op.
inline void* StreamOf(tensorflow::OpKernelContext* ctx) {
  return ctx->op_device_context()->stream()->platform_specific_handle().stream;
}

// Answer of a launcher as a Status.
inline absl::Status CudaStatus(const char* launcher, int answer) {
  if (answer == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(launcher, " failed: ", fusedrec_cuda_error_string(answer), " (CUDA error ",
                                          answer, ")."));
}

// Memory for one op. TensorFlow reuses it only for work that is enqueued later.
inline absl::Status AllocateScratch(tensorflow::OpKernelContext* ctx, int64_t bytes, tensorflow::Tensor* scratch) {
  return ctx->allocate_temp(tensorflow::DT_INT8, tensorflow::TensorShape({bytes}), scratch);
}

// How launchers name the type of a tensor (number.cuh).
template <typename T>
constexpr int NumberTypeOf() {
  return std::is_same<T, float>::value ? 0 : std::is_same<T, Eigen::half>::value ? 1 : 2;
}

}  // namespace fusedrec
