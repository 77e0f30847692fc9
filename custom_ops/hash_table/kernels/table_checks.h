// Checks that the kernels of tables in host memory and of device tables share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/kernel_util.h"
#include "common/limits.h"
#include "hash_table/cpu/hash_table.h"

namespace fusedrec {

template <typename T>
constexpr Storage StorageFor();
template <>
constexpr Storage StorageFor<float>() {
  return Storage::kFloat32;
}
template <>
constexpr Storage StorageFor<Eigen::half>() {
  return Storage::kFloat16;
}
template <>
constexpr Storage StorageFor<Eigen::bfloat16>() {
  return Storage::kBfloat16;
}

template <typename T>
absl::Status ScalarInput(tensorflow::OpKernelContext* ctx, int index, const char* name, T* value) {
  const absl::Status ranked = RequireRank(name, ctx->input(index), 0);
  if (ranked.ok()) *value = ctx->input(index).scalar<T>()();
  return ranked;
}

// Reads the learning rate and the number of the update from inputs `index` and `index + 1`.
inline absl::Status ReadStep(tensorflow::OpKernelContext* ctx, int index, Step* step) {
  TF_RETURN_IF_ERROR(ScalarInput(ctx, index, "learning_rate", &step->learning_rate));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, index + 1, "step", &step->number));
  if (!(step->learning_rate >= 0.0f) || std::isinf(step->learning_rate)) {
    return absl::InvalidArgumentError(absl::StrCat("learning_rate must be finite and >= 0, got ", step->learning_rate,
                                                   ". A schedule may have left its range."));
  }
  if (step->number >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("step must be >= 1, the number of this update, got ", step->number, "."));
}

// Inputs 1 to 4 of an update: handles [W], inverse [V], grads [>= V, dim], scale.
inline absl::Status CheckGradientShapes(tensorflow::OpKernelContext* ctx, int dim) {
  const tensorflow::Tensor &inverse = ctx->input(2), &grads = ctx->input(3);
  TF_RETURN_IF_ERROR(RequireRank("handles", ctx->input(1), 1));
  TF_RETURN_IF_ERROR(RequireRank("inverse", inverse, 1));
  TF_RETURN_IF_ERROR(RequireRank("grads", grads, 2));
  TF_RETURN_IF_ERROR(RequireRank("scale", ctx->input(4), 0));
  if (grads.dim_size(0) >= inverse.NumElements() && grads.dim_size(1) == dim) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("grads must have shape [>= ", inverse.NumElements(), ", ", dim,
                                                 "], one row for each received id, got ", grads.shape().DebugString(),
                                                 "."));
}

// The attribute `dim` of an op that answers rows.
inline absl::Status RequireDim(const TableSpec& spec, int64_t dim) {
  if (dim == spec.dim) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("dim must be that of the table, ", spec.dim, ", got ", dim, "."));
}

inline absl::Status RequireSegment(int64_t segment, int64_t segments) {
  if (segment >= 0 && segment < segments) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("segment must lie in [0, ", segments, "), got ", segment, "."));
}

// A moment of the table, as TableClock gives it.
inline absl::Status ReadMoment(const char* name, const tensorflow::Tensor& clock, Moment* moment) {
  if (clock.shape() != tensorflow::TensorShape({2})) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " must have shape [2], got ", clock.shape().DebugString(), ". Remedy: that of TableClock."));
  }
  const absl::Span<const int64_t> numbers = In<int64_t>(clock);
  TF_RETURN_IF_ERROR(RequireIn(name, numbers[0], 0, kMostClock, "that of TableClock."));
  TF_RETURN_IF_ERROR(RequireIn(name, numbers[1], 0, kMostVersion, "that of TableClock."));
  *moment = {static_cast<uint32_t>(numbers[0]), static_cast<uint32_t>(numbers[1])};
  return absl::OkStatus();
}

// Two writers of one row would leave parts of both.
inline absl::Status RequireDistinct(const char* name, absl::Span<const int64_t> ids, const char* remedy) {
  const int64_t repeat = FirstRepeat(ids.data(), ids.size());
  if (repeat < 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " must be distinct, got ", ids[repeat],
                                                 " twice. Nothing has changed. Remedy: ", remedy));
}

// Ids and records of an import, in host memory.
inline absl::Status RequireRecords(const tensorflow::Tensor& ids, const tensorflow::Tensor& records, int64_t bytes) {
  TF_RETURN_IF_ERROR(RequireRank("ids", ids, 1));
  TF_RETURN_IF_ERROR(RequireRank("records", records, 2));
  if (records.dim_size(0) != ids.NumElements() || records.dim_size(1) != bytes) {
    return absl::InvalidArgumentError(absl::StrCat("records must have shape [", ids.NumElements(), ", ", bytes,
                                                   "], got ", records.shape().DebugString(),
                                                   ". They must come from a table of the same spec."));
  }
  TF_RETURN_IF_ERROR(RequireSize("the size of ids", ids.NumElements()));
  TF_RETURN_IF_ERROR(RequireDistinct("ids", In<int64_t>(ids), "one record of each id."));
  const uint8_t* const first = records.flat<uint8_t>().data();
  for (int64_t i = 0; i < ids.NumElements(); ++i) {
    uint32_t last;  // begins a record (row_records.h)
    std::memcpy(&last, first + i * bytes, sizeof(last));
    TF_RETURN_IF_ERROR(RequireIn("the clock in a record", last, 0, kMostClock, "a record of TableReadRecords."));
  }
  return absl::OkStatus();
}

// For ops of replicas that are averaged.
inline absl::Status RequireAveraged(const TableSpec& spec) {
  if (spec.averaged) return absl::OkStatus();
  return absl::FailedPreconditionError("this table was not made with averaged=True, so it does not know what changes.");
}

// Ids of all segments and their bounds, inputs `index` and `index + 1`.
inline absl::Status RequireGroupedIds(tensorflow::OpKernelContext* ctx, int64_t segments, int index, const char* name) {
  const tensorflow::Tensor &ids = ctx->input(index), &splits = ctx->input(index + 1);
  TF_RETURN_IF_ERROR(RequireRank(name, ids, 1));
  TF_RETURN_IF_ERROR(RequireRank("segment_splits", splits, 1));
  const absl::Span<const int64_t> bounds = In<int64_t>(splits);
  if (static_cast<int64_t>(bounds.size()) == segments + 1 && bounds.front() == 0 && bounds.back() == ids.NumElements() &&
      std::is_sorted(bounds.begin(), bounds.end())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("segment_splits of ", name, " must be ", segments + 1,
                                                 " numbers from 0 to ", ids.NumElements(), " that do not decrease."));
}

// Rows and headers of a merge; width: numbers of a row and its slots.
inline absl::Status RequireNumbers(const tensorflow::Tensor& ids, const tensorflow::Tensor& numbers,
                                   const tensorflow::Tensor& headers, int64_t width) {
  TF_RETURN_IF_ERROR(RequireRank("numbers", numbers, 2));
  if (numbers.dim_size(0) >= ids.NumElements() && numbers.dim_size(1) == width && headers.shape() == ids.shape()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "numbers must have shape [>= ", ids.NumElements(), ", ", width, "] and headers [", ids.NumElements(), "], got ",
      numbers.shape().DebugString(), " and ", headers.shape().DebugString(), "."));
}

// Ids and counts of an import of candidates.
inline absl::Status RequireCandidates(const tensorflow::Tensor& ids, const tensorflow::Tensor& counts) {
  TF_RETURN_IF_ERROR(RequireRank("ids", ids, 1));
  if (counts.shape() != ids.shape()) {
    return absl::InvalidArgumentError(absl::StrCat("counts must have the shape of ids, ", ids.shape().DebugString(),
                                                   ", got ", counts.shape().DebugString(), "."));
  }
  for (const int64_t count : In<int64_t>(counts)) {
    if (count < 1 || count > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(absl::StrCat("counts must lie in [1, 2^31), got ", count, "."));
    }
  }
  return absl::OkStatus();
}

}  // namespace fusedrec
