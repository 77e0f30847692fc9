// The table as a TensorFlow resource, and the base of its kernels, which are the same for all kinds of tables (table.h).
#pragma once

#include <memory>

#include "common/gpu_kernel_util.h"
#include "common/limits.h"
#include "hash_table/table.h"
#include "rank_partition/rank_partition.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace fusedrec {

class TableResource : public tensorflow::ResourceBase {
 public:
  explicit TableResource(std::unique_ptr<Table> table) : table_(std::move(table)) {}
  Table* table() const { return table_.get(); }
  std::string DebugString() const override {
    return absl::StrCat("fusedrec.HashTable of ", table_->segments(), " segments");
  }

 private:
  const std::unique_ptr<Table> table_;
};

template <On kOn, Table::Access kAccess>
class TableKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) final {
    const ParallelFor pool = CpuPool(ctx);
    if constexpr (kOn == On::kGpu) {
      Gpu gpu(ctx);  // allocates through itself
      OP_REQUIRES_OK(ctx, RunOn(ctx, {pool, gpu.stream, &gpu.memory}));
    } else {
      OP_REQUIRES_OK(ctx, RunOn(ctx, {pool}));
    }
  }

 protected:
  virtual absl::Status Run(OpKernelContext* ctx, Table* table, const TableCall& call) = 0;

 private:
  absl::Status RunOn(OpKernelContext* ctx, const TableCall& call) {
    tensorflow::core::RefCountPtr<TableResource> resource;
    FUSEDREC_TRY(tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, 0), &resource));
    const auto lock = resource->table()->Begin(call, kAccess);
    return lock.ok() ? Run(ctx, resource->table(), call) : lock.status();
  }
};

// The work of a kernel, as a function of its context, its table and its call.
template <On kOn, Table::Access kAccess, absl::Status (*kRun)(OpKernelContext*, Table*, const TableCall&)>
class TableFunctionKernel : public TableKernel<kOn, kAccess> {
 public:
  using TableKernel<kOn, kAccess>::TableKernel;

 protected:
  absl::Status Run(OpKernelContext* ctx, Table* table, const TableCall& call) override { return kRun(ctx, table, call); }
};

// Registers Function for "Fusedrec>Table" #Function. access: of Table::Access; host: as in FUSEDREC_KERNEL_ON_BOTH.
#define FUSEDREC_TABLE_KERNEL(Function, access, host)                                     \
  template <On kOn>                                                                       \
  using Table##Function##Op = TableFunctionKernel<kOn, Table::Access::access, &Function>; \
  FUSEDREC_KERNEL_ON_BOTH("Table" #Function, Table##Function##Op, .HostMemory("table") host)

template <typename T>
constexpr Storage StorageFor() {
  return std::is_same<T, float>::value         ? Storage::kFloat32
         : std::is_same<T, Eigen::half>::value ? Storage::kFloat16
                                               : Storage::kBfloat16;
}

// Reads inputs 1 and 2. on_host: whether the ids are in host memory.
inline absl::Status ReadMessage(OpKernelContext* ctx, const Table& table, bool on_host, Message* message) {
  const Tensor &entries = ctx->input(1), &splits = ctx->input(2);
  FUSEDREC_TRY(RequireRank("message", entries, 1));
  FUSEDREC_TRY(RequireRank("received_splits", splits, 1));
  FUSEDREC_TRY(RequireSize("the size of the message", entries.NumElements()));
  const int64_t size = entries.NumElements(), segments = table.segments();
  *message = {In<int64_t>(entries), In<int32_t>(splits), size - splits.NumElements() * segments};
  return on_host ? CheckMessage(message->entries, message->source_splits, segments)
                 : CheckReceivedSplits(size, message->source_splits, segments);
}

}  // namespace fusedrec
