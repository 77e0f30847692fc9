// Helpers of every OpKernel: TensorFlow's thread pool as a ParallelFor, and checks whose messages name the argument, its
// value, the wanted value and the remedy.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/parallel.h"
#include "common/tf_compat.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace fusedrec {

inline ParallelFor CpuPool(tensorflow::OpKernelContext* ctx) {
  auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
  return [pool](int64_t total, int64_t unit_cost, const std::function<void(int64_t, int64_t)>& body) {
    if (total > 0) pool->ParallelFor(total, BlocksByCost<tensorflow::thread::ThreadPool>(unit_cost, 0), body);
  };
}

template <typename T>
absl::Span<const T> In(const tensorflow::Tensor& t) {
  return {t.flat<T>().data(), static_cast<size_t>(t.NumElements())};
}

template <typename T>
absl::Span<T> Out(tensorflow::Tensor* t) {
  return {t->flat<T>().data(), static_cast<size_t>(t->NumElements())};
}

inline absl::Status RequireRank(const char* name, const tensorflow::Tensor& t, int rank) {
  if (t.dims() == rank) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " must have rank ", rank, ", got shape ",
                                                 t.shape().DebugString(), ". Reshape it before the call."));
}

// Checks that `splits` runs from 0 to `total` without decreasing and has at least one entry.
inline absl::Status RequireSplits(const char* name, absl::Span<const int64_t> splits, int64_t total) {
  const std::string remedy = ". Build it from the lengths of the segments with a cumulative sum that starts at 0.";
  if (splits.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(name, " must have at least one entry, got none", remedy));
  }
  if (splits.front() != 0 || splits.back() != total) {
    return absl::InvalidArgumentError(absl::StrCat(name, " must run from 0 to ", total, ", got first ",
                                                   splits.front(), ", last ", splits.back(), remedy));
  }
  for (size_t s = 1; s < splits.size(); ++s) {
    if (splits[s] < splits[s - 1]) {
      return absl::InvalidArgumentError(absl::StrCat(name, " must not decrease, got ", splits[s - 1], " then ",
                                                     splits[s], " at entry ", s, remedy));
    }
  }
  return absl::OkStatus();
}

}  // namespace fusedrec
