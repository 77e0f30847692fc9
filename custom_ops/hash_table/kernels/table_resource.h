// The table as a TensorFlow resource, and the base of its kernels.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/kernel_util.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/kernels/table_checks.h"
#include "rank_partition/rank_partition.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace fusedrec {

// Reads the attributes of HashTable. device: kOnCpu, or kOnDevice, where host_rows decides which of a GPU's places it is.
inline absl::Status ReadAttributes(tensorflow::OpKernelConstruction* ctx, Place device, TableSpec* spec) {
  std::vector<std::string> texts;
  TF_RETURN_IF_ERROR(ctx->GetAttr("tables", &texts));
  const std::string refused = ReadTables(texts, device, spec);
  return refused.empty() ? absl::OkStatus() : absl::InvalidArgumentError(refused);
}

class TableResource : public tensorflow::ResourceBase {
 public:
  explicit TableResource(std::unique_ptr<HashTable> table) : table_(std::move(table)) {}
  HashTable* table() const { return table_.get(); }
  std::string DebugString() const override {
    return absl::StrCat("fusedrec.HashTable of ", table_->segments(), " segments");
  }

 private:
  std::unique_ptr<HashTable> table_;
};

// Output 0: a handle that alone keeps `resource`, whose one reference it takes.
template <typename Resource>
absl::Status OutputOwningHandle(tensorflow::OpKernelContext* ctx, Resource* resource) {
  const auto handle = tensorflow::ResourceHandle::MakeRefCountingHandle(resource, ctx->device()->name());
  tensorflow::Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, tensorflow::TensorShape({}), &out));
  out->scalar<tensorflow::ResourceHandle>()() = handle;
  return absl::OkStatus();
}

// A kernel whose first input is a table.
class TableKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* ctx) final {
    tensorflow::core::RefCountPtr<TableResource> resource;
    OP_REQUIRES_OK(ctx, tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, 0), &resource));
    OP_REQUIRES_OK(ctx, Run(ctx, resource->table()));
  }

 protected:
  virtual absl::Status Run(tensorflow::OpKernelContext* ctx, HashTable* table) = 0;
};

// The work of a kernel, as a function of its context and table.
template <absl::Status (*kRun)(tensorflow::OpKernelContext*, HashTable*)>
class TableFunctionOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status Run(tensorflow::OpKernelContext* ctx, HashTable* table) override { return kRun(ctx, table); }
};

// Reads inputs 1 and 2.
inline absl::Status ReadMessage(tensorflow::OpKernelContext* ctx, const HashTable& table, Message* message) {
  const tensorflow::Tensor &entries = ctx->input(1), &splits = ctx->input(2);
  TF_RETURN_IF_ERROR(RequireRank("message", entries, 1));
  TF_RETURN_IF_ERROR(RequireRank("received_splits", splits, 1));
  TF_RETURN_IF_ERROR(RequireSize("the size of the message", entries.NumElements()));
  *message = {In<int64_t>(entries), In<int32_t>(splits), 0};
  TF_RETURN_IF_ERROR(CheckMessage(message->entries, message->source_splits, table.segments()));
  message->num_ids = entries.NumElements() - splits.NumElements() * table.segments();
  return absl::OkStatus();
}

}  // namespace fusedrec
