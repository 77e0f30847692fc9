// The ops outside the training step on a table in host memory: sizes, statistics, eviction, checkpoints.
//
// They are functions of an op's context and the table, so a device table with rows in host memory can call them, too.
#pragma once

#include <algorithm>
#include <vector>

#include "common/kernel_util.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cpu/rows/pages.h"
#include "hash_table/kernels/table_checks.h"

namespace fusedrec {
namespace upkeep {

inline absl::Status Give(tensorflow::OpKernelContext* ctx, int index, const std::vector<int64_t>& values) {
  tensorflow::Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(index, tensorflow::TensorShape({static_cast<int64_t>(values.size())}), &out));
  std::copy(values.begin(), values.end(), out->flat<int64_t>().data());
  return absl::OkStatus();
}

inline absl::Status GiveScalar(tensorflow::OpKernelContext* ctx, int64_t value) {
  tensorflow::Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, tensorflow::TensorShape({}), &out));
  out->scalar<int64_t>()() = value;
  return absl::OkStatus();
}

inline absl::Status ReadSegment(tensorflow::OpKernelContext* ctx, const HashTable& table, int64_t* segment) {
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 1, "segment", segment));
  return RequireSegment(*segment, table.segments());
}

// traffic: [segments, 3]
inline absl::Status GiveTraffic(tensorflow::OpKernelContext* ctx, const std::vector<int64_t>& traffic) {
  tensorflow::Tensor* out;
  const tensorflow::TensorShape shape({static_cast<int64_t>(traffic.size()) / 3, 3});
  TF_RETURN_IF_ERROR(ctx->allocate_output(2, shape, &out));
  std::copy(traffic.begin(), traffic.end(), out->flat<int64_t>().data());
  return absl::OkStatus();
}

inline absl::Status GiveCounts(tensorflow::OpKernelContext* ctx, HashTable* table) {
  tensorflow::Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, tensorflow::TensorShape({table->segments(), 6}), &out));
  auto matrix = out->matrix<int64_t>();
  for (int64_t s = 0; s < table->segments(); ++s) {
    const SegmentStatistics of = table->Statistics(s);
    const int64_t row[] = {of.keys, of.hits, of.inserts, of.evictions, of.refused, of.candidates};
    for (int i = 0; i < 6; ++i) matrix(s, i) = row[i];
  }
  return Give(ctx, 1, {table->key_bytes(), table->row_bytes(0), table->row_bytes(1), table->rows_in_pool(0),
                       table->rows_in_pool(1)});
}

inline absl::Status Statistics(tensorflow::OpKernelContext* ctx, HashTable* table) {
  TF_RETURN_IF_ERROR(GiveTraffic(ctx, std::vector<int64_t>(3 * table->segments(), 0)));
  return GiveCounts(ctx, table);
}

inline absl::Status Size(tensorflow::OpKernelContext* ctx, HashTable* table) {
  std::vector<int64_t> sizes;
  for (int64_t s = 0; s < table->segments(); ++s) sizes.push_back(table->size(s));
  return Give(ctx, 0, sizes);
}

inline absl::Status Keys(tensorflow::OpKernelContext* ctx, HashTable* table) {
  int64_t segment;
  Moment since;
  std::vector<int64_t> ids, handles;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, *table, &segment));
  TF_RETURN_IF_ERROR(ReadMoment("since", ctx->input(2), &since));
  table->Keys(segment, since, CpuPool(ctx), &ids, &handles);
  TF_RETURN_IF_ERROR(Give(ctx, 0, ids));
  return Give(ctx, 1, handles);
}

inline absl::Status ReadRecords(tensorflow::OpKernelContext* ctx, HashTable* table) {
  const tensorflow::Tensor& handles = ctx->input(1);
  TF_RETURN_IF_ERROR(RequireRank("handles", handles, 1));
  for (const int64_t handle : In<int64_t>(handles)) {
    if (handle < 0 || !table->IsHandle(handle)) {
      return absl::InvalidArgumentError(absl::StrCat("handles must be of a TableKeys of this table, got ", handle, "."));
    }
  }
  tensorflow::Tensor* out;
  const tensorflow::TensorShape shape({handles.NumElements(), table->records().bytes()});
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &out));
  WantHugePages(out->data(), out->TotalBytes());  // a save holds training up meanwhile
  table->records().Read(In<int64_t>(handles), CpuPool(ctx), reinterpret_cast<char*>(out->flat<uint8_t>().data()));
  return absl::OkStatus();
}

inline absl::Status Import(tensorflow::OpKernelContext* ctx, HashTable* table) {
  int64_t segment;
  const tensorflow::Tensor &ids = ctx->input(2), &records = ctx->input(3);
  TF_RETURN_IF_ERROR(ReadSegment(ctx, *table, &segment));
  TF_RETURN_IF_ERROR(RequireRecords(ids, records, table->records().bytes()));
  return table->records().Write(segment, In<int64_t>(ids),
                             reinterpret_cast<const char*>(records.flat<uint8_t>().data()), CpuPool(ctx));
}

inline absl::Status Remove(tensorflow::OpKernelContext* ctx, HashTable* table) {
  int64_t segment;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, *table, &segment));
  TF_RETURN_IF_ERROR(RequireRank("ids", ctx->input(2), 1));
  if (table->HasWaiting()) {
    return absl::FailedPreconditionError(
        "rows cannot be removed while accumulated gradients wait for their update. Remove them after it.");
  }
  return GiveScalar(ctx, table->Remove(segment, In<int64_t>(ctx->input(2))));
}

inline absl::Status Evict(tensorflow::OpKernelContext* ctx, HashTable* table) {
  int64_t segment, count;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, *table, &segment));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 2, "count", &count));
  if (count < 0) return absl::InvalidArgumentError(absl::StrCat("count must be >= 0, got ", count, "."));
  return GiveScalar(ctx, table->Evict(segment, count));
}

inline absl::Status Tombstones(tensorflow::OpKernelContext* ctx, HashTable* table) {
  int64_t segment;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, *table, &segment));
  return Give(ctx, 0, table->Tombstones(segment));
}

inline absl::Status ForgetTombstones(tensorflow::OpKernelContext*, HashTable* table) {
  table->ForgetTombstones();
  return absl::OkStatus();
}

inline absl::Status Candidates(tensorflow::OpKernelContext* ctx, HashTable* table) {
  int64_t segment;
  std::vector<int64_t> ids, counts;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, *table, &segment));
  table->Candidates(segment, &ids, &counts);
  TF_RETURN_IF_ERROR(Give(ctx, 0, ids));
  return Give(ctx, 1, counts);
}

inline absl::Status ImportCandidates(tensorflow::OpKernelContext* ctx, HashTable* table) {
  int64_t segment;
  const tensorflow::Tensor &ids = ctx->input(2), &counts = ctx->input(3);
  TF_RETURN_IF_ERROR(ReadSegment(ctx, *table, &segment));
  TF_RETURN_IF_ERROR(RequireCandidates(ids, counts));
  return table->SetCandidates(segment, In<int64_t>(ids), In<int64_t>(counts));
}

inline absl::Status Clock(tensorflow::OpKernelContext* ctx, HashTable* table) {
  return Give(ctx, 0, {table->clock(), table->version()});
}

inline absl::Status SetClock(tensorflow::OpKernelContext* ctx, HashTable* table) {
  Moment clock;
  TF_RETURN_IF_ERROR(ReadMoment("clock", ctx->input(1), &clock));
  table->SetClock(clock.lookups, clock.version);
  return absl::OkStatus();
}

inline absl::Status Clear(tensorflow::OpKernelContext*, HashTable* table) {
  table->Clear();
  return absl::OkStatus();
}

}  // namespace upkeep
}  // namespace fusedrec
