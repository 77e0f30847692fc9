// The table on a device as a TensorFlow resource, and the base of its kernels.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/gpu_kernel_util.h"
#include "hash_table/cuda/kernels/device_form.h"
#include "hash_table/cuda/kernels/host_rows.h"
#include "hash_table/kernels/table_resource.h"
#include "rank_partition/rank_partition.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace fusedrec {

class DeviceTableResource : public tensorflow::ResourceBase {
 public:
  static absl::Status Make(tensorflow::OpKernelContext* ctx, const TableSpec& spec,
                           DeviceTableResource** made) {
    tensorflow::core::RefCountPtr<DeviceTableResource> resource(new DeviceTableResource(spec));
    tensorflow::Allocator* memory = ctx->device()->GetAllocator(tensorflow::AllocatorAttributes());
    const FusedrecAllocator allocator{memory, &Allocate, &Release};
    if (spec.host_rows) {
      auto host_rows = HostRows::Make(spec, allocator, StreamOf(ctx));
      if (!host_rows.ok()) return host_rows.status();
      resource->host_rows_ = *std::move(host_rows);
    } else {
      const DeviceTexts texts(resource->spec_);
      TF_RETURN_IF_ERROR(resource->StatusOf(fusedrec_table_create(&texts, &allocator, &resource->table_, StreamOf(ctx)),
                                            "its segments"));
    }
    *made = resource.release();
    return absl::OkStatus();
  }
  // TensorFlow reuses the memory only for work that is enqueued later.
  ~DeviceTableResource() override { fusedrec_table_destroy(table_); }

  // One of the two is null: all rows are on the device, or in host memory.
  FusedrecDeviceTable* table() const { return table_; }
  HostRows* host_rows() const { return host_rows_.get(); }
  const TableSpec& spec() const { return spec_; }
  int64_t segments() const { return static_cast<int64_t>(spec_.seeds.size()); }
  absl::Status StatusOf(int answer, const char* needs) const {
    return DeviceTableStatus(answer, spec_, needs,
                             answer == kDeviceTableFull ? fusedrec_table_full_segment(table_) : 0);
  }
  std::string DebugString() const override {
    return absl::StrCat("fusedrec.HashTable of ", segments(), " segments on a device",
                        host_rows_ == nullptr ? "" : ", rows in host memory");
  }

 private:
  explicit DeviceTableResource(const TableSpec& spec) : spec_(spec) {}

  // Does not wait for memory that others may give back, so the table fails at once.
  static void* Allocate(void* memory, int64_t bytes) {
    const tensorflow::AllocationAttributes at_once(false, false, nullptr);
    return static_cast<tensorflow::Allocator*>(memory)->AllocateRaw(256, bytes, at_once);
  }
  static void Release(void* memory, void* data) { static_cast<tensorflow::Allocator*>(memory)->DeallocateRaw(data); }

  const TableSpec spec_;
  FusedrecDeviceTable* table_ = nullptr;
  std::unique_ptr<HostRows> host_rows_;
};

// A kernel whose first input is a table on a device.
class DeviceTableKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* ctx) final {
    tensorflow::core::RefCountPtr<DeviceTableResource> resource;
    OP_REQUIRES_OK(ctx, tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, 0), &resource));
    OP_REQUIRES_OK(ctx, Run(ctx, *resource));
  }

 protected:
  virtual absl::Status Run(tensorflow::OpKernelContext* ctx, const DeviceTableResource& resource) = 0;
};

// The same, for a function of context and table.
template <absl::Status (*kRun)(tensorflow::OpKernelContext*, const DeviceTableResource&)>
class DeviceTableFunctionOp : public DeviceTableKernel {
 public:
  using DeviceTableKernel::DeviceTableKernel;

 protected:
  absl::Status Run(tensorflow::OpKernelContext* ctx, const DeviceTableResource& resource) override {
    return kRun(ctx, resource);
  }
};

// Inputs 1 and 2.
struct MessageInput {
  FusedrecMessage message;
  int64_t num_ids;
};

inline absl::Status ReadDeviceMessage(tensorflow::OpKernelContext* ctx, const DeviceTableResource& resource, MessageInput* read) {
  const tensorflow::Tensor &entries = ctx->input(1), &splits = ctx->input(2);
  TF_RETURN_IF_ERROR(RequireRank("message", entries, 1));
  TF_RETURN_IF_ERROR(RequireRank("received_splits", splits, 1));
  TF_RETURN_IF_ERROR(RequireSize("the size of the message", entries.NumElements()));
  TF_RETURN_IF_ERROR(CheckReceivedSplits(entries.NumElements(), In<int32_t>(splits), resource.segments()));
  read->message = {In<int64_t>(entries).data(), In<int32_t>(splits).data(), splits.NumElements()};
  read->num_ids = entries.NumElements() - splits.NumElements() * resource.segments();
  return absl::OkStatus();
}

}  // namespace fusedrec
