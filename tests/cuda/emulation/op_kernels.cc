// The GPU form of kernels as kernels for the CPU, over the emulated launchers: so TensorFlow runs their code without a
// device. They carry a label, by which a graph asks for them where a kernel for the CPU is registered, too. The library
// of the ops has the ops and the CPU form.
#include "common/gpu_kernel_util.h"
#include "hash_table/cuda/buffer/buffer_cuda.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

extern "C" bool emulation_allocates();  // streams.h

// Memory that ends on demand: ops count their allocations, and tables get TensorFlow's allocator through one that counts.
namespace {

void* AllocateWhileAnyAreLeft(void* inner, int64_t bytes) {
  const auto* of = static_cast<const FusedrecAllocator*>(inner);
  return emulation_allocates() ? of->allocate(of->context, bytes) : nullptr;
}

void Release(void* inner, void* data) {
  const auto* of = static_cast<const FusedrecAllocator*>(inner);
  of->release(of->context, data);
}

FusedrecAllocator Counting(const FusedrecAllocator& allocator) {
  auto* const inner = new FusedrecAllocator(allocator);  // as long as the process: few tables are made
  return {inner, &AllocateWhileAnyAreLeft, &Release};
}

int CreateTable(const FusedrecTableTexts* texts, const FusedrecAllocator* allocator, FusedrecDeviceTable** table,
                void* stream) {
  const FusedrecAllocator counting = Counting(*allocator);
  return fusedrec_table_create(texts, &counting, table, stream);
}

int CreateBuffer(const FusedrecTableTexts* texts, const FusedrecAllocator* allocator, FusedrecDeviceBuffer** buffer,
                 void* stream) {
  const FusedrecAllocator counting = Counting(*allocator);
  return fusedrec_buffer_create(texts, &counting, buffer, stream);
}

}  // namespace

#define fusedrec_table_create CreateTable
#define fusedrec_buffer_create CreateBuffer
#undef REGISTER_OP_IMPL
#define REGISTER_OP_IMPL(number, name, is_system_op)                                                       \
  static ::tensorflow::InitOnStartupMarker const register_op##number TF_ATTRIBUTE_UNUSED =                 \
      TF_INIT_ON_STARTUP_IF(false) << ::tensorflow::register_op::OpDefBuilderWrapper(name)
#undef FUSEDREC_CPU_KERNEL
#define FUSEDREC_CPU_KERNEL(builder, ...) static_assert(true)
#undef FUSEDREC_GPU_KERNEL
#define FUSEDREC_GPU_KERNEL(builder, ...) REGISTER_KERNEL_BUILDER(builder, __VA_ARGS__)
#define Device(type) Device(::tensorflow::DEVICE_CPU).Label("emulated")  // NOLINT
void* fusedrec::StreamOf(tensorflow::OpKernelContext*) { return nullptr; }
absl::Status fusedrec::AllocateScratch(tensorflow::OpKernelContext* ctx, int64_t bytes, tensorflow::Tensor* scratch) {
  if (!emulation_allocates()) return absl::ResourceExhaustedError("no memory");
  return ctx->allocate_temp(tensorflow::DT_INT8, tensorflow::TensorShape({bytes}), scratch);
}

#include "hash_table/cuda/device_table.cc"  // NOLINT
#include "hash_table/cuda/host_rows.cc"  // NOLINT
#include "hash_table/kernels/hash_table_admin_kernel.cc"  // NOLINT
#include "hash_table/kernels/hash_table_kernel.cc"  // NOLINT
#include "fuse_ids/fuse_ids_op.cc"  // NOLINT
#include "initial_rows/initial_rows_op.cc"  // NOLINT
#include "jagged_attention/attention_kernel.cc"  // NOLINT
#include "join_messages/join_messages_op.cc"  // NOLINT
#include "rank_partition/rank_partition_op.cc"  // NOLINT
#include "recovery/recovery_op.cc"  // NOLINT
#include "segment_unique/segment_unique_op.cc"  // NOLINT
