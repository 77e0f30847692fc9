// Helpers of the GPU kernels: they refuse sizes beyond the limits, and make the call for a launcher.
#pragma once

#include <initializer_list>

#include "common/gpu_kernel_util.h"
#include "jagged_attention/cuda/jagged_attention_cuda.h"
#include "jagged_attention/kernels/kernel_arguments.h"

namespace fusedrec {

// Checks and reads row_splits and num_targets, inputs `first` and `first + 1`, and the bias from input `first_bias` on. It
// reads only the sizes of tensors on the device.
inline absl::Status ReadRowsAndBias(tensorflow::OpKernelContext* ctx, const BiasAndRows& options, int first,
                                    int first_bias, int64_t tokens, int64_t heads, FusedrecAttention* call) {
  JaggedRows rows;
  RelativeBias bias;
  TF_RETURN_IF_ERROR(RequireSize("the number of tokens", tokens));
  TF_RETURN_IF_ERROR(options.Rows(ctx, first, tokens, heads, &rows));
  TF_RETURN_IF_ERROR(options.Bias(ctx, first_bias, rows, &bias));
  TF_RETURN_IF_ERROR(RequireSize("the size of position_weights", bias.position_weights.size()));
  if (static_cast<int64_t>(bias.thresholds.size()) > kAttentionMaxThresholds) {
    return absl::InvalidArgumentError(absl::StrCat("thresholds must be at most ", kAttentionMaxThresholds,
                                                   " on a GPU, got ", bias.thresholds.size(), "."));
  }
  call->tokens = tokens;
  call->query_splits = rows.query_splits.empty() ? nullptr : rows.query_splits.data();
  call->heads = heads;
  call->batch = static_cast<int64_t>(rows.row_splits.size()) - 1;
  call->row_splits = rows.row_splits.data();
  call->num_targets = rows.num_targets.data();
  call->contextual_lengths = rows.contextual_lengths.empty() ? nullptr : rows.contextual_lengths.data();
  call->target_group_size = rows.target_group_size;
  call->attention_window = rows.attention_window;
  call->min_full_length = rows.min_full_length;
  call->global_window = rows.global_window;
  call->dropped = rows.dropped;
  call->pair_seed = rows.pair_seed;
  if (options.position()) {
    call->max_length = (static_cast<int64_t>(bias.position_weights.size()) + 1) / 2;
    call->position_weights = bias.position_weights.data();
  }
  const bool buckets = bias.time == TimeMap::kBuckets, none = bias.time == TimeMap::kNone;
  call->num_thresholds = buckets ? static_cast<int64_t>(bias.thresholds.size()) : -1;
  call->thresholds = bias.thresholds.data();
  call->time_function = none || buckets ? 0 : static_cast<int64_t>(bias.time) - static_cast<int64_t>(TimeMap::kBuckets);
  call->time_weights = bias.time_weights.data();
  call->asks = bias.asks.data();
  call->answers = bias.answers.data();
  return absl::OkStatus();
}

struct GradientOf {
  int input;
  bool is_computed;  // false: the input has no part in the result, so its gradient is 0
};

// Allocates output i for the gradient of inputs[i]. It is 0 where no launcher writes it.
inline absl::Status AllocateGradients(tensorflow::OpKernelContext* ctx, std::initializer_list<GradientOf> inputs,
                                      tensorflow::Tensor** outputs) {
  int i = 0;
  for (const GradientOf& of : inputs) {
    tensorflow::Tensor** const output = &outputs[i];
    TF_RETURN_IF_ERROR(ctx->allocate_output(i++, ctx->input(of.input).shape(), output));
    if (of.is_computed) continue;
    TF_RETURN_IF_ERROR(
        CudaStatus("fill", fusedrec_fill_zeros((*output)->data(), (*output)->TotalBytes(), StreamOf(ctx))));
  }
  return absl::OkStatus();
}

// Allocates the scratch of a launcher, calls it and returns its answer.
template <typename ScratchBytes, typename Launcher>
absl::Status Launch(tensorflow::OpKernelContext* ctx, const char* name, const FusedrecAttention& call,
                    const ScratchBytes& scratch_bytes, const Launcher& launcher) {
  tensorflow::Tensor scratch;
  TF_RETURN_IF_ERROR(AllocateScratch(ctx, scratch_bytes(&call), &scratch));
  return CudaStatus(name, launcher(&call, scratch.data(), StreamOf(ctx)));
}

// The launchers read these inputs on the host. The last argument: .HostMemory of further inputs.
#define FUSEDREC_REGISTER_ATTENTION(NAME, KERNEL, T, MORE)      \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>" #NAME)               \
                              .Device(DEVICE_GPU)               \
                              .TypeConstraint<T>("T")           \
                              .HostMemory("row_splits")         \
                              .HostMemory("num_targets")        \
                              .HostMemory("contextual_lengths") \
                              .HostMemory("query_splits")       \
                              .HostMemory("thresholds") MORE,   \
                          KERNEL);

}  // namespace fusedrec
