// Helpers of the GPU form of kernels, which has no device code: it checks, allocates and calls launchers (cuda_api.h).
//
// Arguments that are small and decide on sizes (splits, counts) are in host memory. They are checked as on a CPU, and
// no size waits for the device. Arrays of the size of a batch stay on the device.
#pragma once

#include <type_traits>

#include "common/cuda_api.h"
#include "common/kernel_util.h"
#include "common/limits.h"
#ifdef FUSEDREC_CUDA
#include "xla/stream_executor/stream.h"
#endif

namespace fusedrec {

// The cudaStream_t of this op.
void* StreamOf(tensorflow::OpKernelContext* ctx);
// Memory for one op. TensorFlow reuses it only for work that is enqueued later.
absl::Status AllocateScratch(tensorflow::OpKernelContext* ctx, int64_t bytes, tensorflow::Tensor* scratch);
#ifdef FUSEDREC_CUDA
inline void* StreamOf(tensorflow::OpKernelContext* ctx) {
  return ctx->op_device_context()->stream()->platform_specific_handle().stream;
}
inline absl::Status AllocateScratch(tensorflow::OpKernelContext* ctx, int64_t bytes, tensorflow::Tensor* scratch) {
  return ctx->allocate_temp(tensorflow::DT_INT8, tensorflow::TensorShape({bytes}), scratch);
}
#endif

// What launchers take from an op on a GPU: its stream, and memory for the op's duration.
class Gpu {
 public:
  explicit Gpu(tensorflow::OpKernelContext* ctx) : ctx_(ctx), stream(StreamOf(ctx)), memory{this, &Allocate, &Release} {}
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Answer of a launcher as a Status.
  absl::Status Check(const char* launcher, int answer) const {
    if (answer == kCudaOutOfMemory && !status_.ok()) return status_;
    if (answer == 0) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(launcher, " failed: ", fusedrec_cuda_error_string(answer), " (CUDA error ",
                                            answer, ")."));
  }

  // Copies a tensor on the device; waits for it.
  template <typename T>
  absl::Status CopyToHost(const tensorflow::Tensor& t, std::vector<T>* host) const {
    host->resize(t.NumElements());
    return Check("copy to the host", fusedrec_copy_to_host(host->data(), t.data(), host->size() * sizeof(T), stream));
  }

 private:
  static void* Allocate(void* gpu, int64_t bytes) {
    auto* const self = static_cast<Gpu*>(gpu);
    tensorflow::Tensor scratch;
    self->status_ = AllocateScratch(self->ctx_, bytes, &scratch);
    if (!self->status_.ok()) return nullptr;
    self->scratch_.push_back(scratch);
    return scratch.data();
  }
  // All memory ends with the op.
  static void Release(void*, void*) {}

  tensorflow::OpKernelContext* const ctx_;
  std::vector<tensorflow::Tensor> scratch_;
  absl::Status status_;  // of the last allocation

 public:
  void* const stream;
  const FusedrecAllocator memory;
};

// How launchers name the type of a tensor (number.cuh).
template <typename T>
constexpr int NumberTypeOf() {
  return std::is_same<T, float>::value ? 0 : std::is_same<T, Eigen::half>::value ? 1 : 2;
}

}  // namespace fusedrec
