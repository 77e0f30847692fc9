// The OpKernels for a GPU as kernels for the CPU, over the emulated launchers: so TensorFlow runs their code without a
// device. They carry a label, by which a graph asks for them where a kernel for the CPU is registered, too.
#include "common/gpu_kernel_util.h"
#include "hash_table/cuda/buffer/buffer_cuda.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

extern "C" bool emulation_allocates();  // streams.h

// Memory that ends on demand: tables get TensorFlow's allocator through one that counts.
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

int CreateTable(const FusedrecTableSpec* spec, const FusedrecAllocator* allocator, FusedrecDeviceTable** table,
                void* stream) {
  const FusedrecAllocator counting = Counting(*allocator);
  return fusedrec_table_create(spec, &counting, table, stream);
}

int CreateBuffer(const FusedrecTableSpec* spec, const FusedrecAllocator* allocator, int64_t hot_rows,
                 FusedrecDeviceBuffer** buffer, void* stream) {
  const FusedrecAllocator counting = Counting(*allocator);
  return fusedrec_buffer_create(spec, &counting, hot_rows, buffer, stream);
}

}  // namespace

#define fusedrec_table_create CreateTable
#define fusedrec_buffer_create CreateBuffer
#define Device(type) Device(::tensorflow::DEVICE_CPU).Label("emulated")  // NOLINT
#define StreamOf(ctx) (static_cast<void>(ctx), static_cast<void*>(nullptr))
#undef FUSEDREC_CPU_KERNEL
#undef FUSEDREC_GPU_KERNEL
#define FUSEDREC_CPU_KERNEL(builder, ...) static_assert(true, "the op library has it")
#define FUSEDREC_GPU_KERNEL(builder, ...) REGISTER_KERNEL_BUILDER(builder, __VA_ARGS__)

#include "hash_table/cuda/kernels/hot_rows.cc"  // NOLINT
#include "hash_table/cuda/kernels/host_rows.cc"  // NOLINT
#include "hash_table/cuda/kernels/next_batch.cc"  // NOLINT
#include "hash_table/cuda/kernels/row_transfers.cc"  // NOLINT
#include "hash_table/cuda/kernels/hash_table_admin_gpu_kernel.cc"  // NOLINT
#include "hash_table/cuda/kernels/hash_table_gpu_kernel.cc"  // NOLINT
#include "hash_table/cuda/kernels/hash_table_replicas_gpu_kernel.cc"  // NOLINT
#include "hash_table/cuda/kernels/hash_table_update_gpu_kernel.cc"  // NOLINT
#include "fuse_ids/cuda/fuse_ids_gpu_kernel.cc"  // NOLINT
#include "initial_rows/cuda/initial_rows_gpu_kernel.cc"  // NOLINT
#include "jagged_attention/attention_kernel.cc"  // NOLINT
#include "join_messages/cuda/join_messages_gpu_kernel.cc"  // NOLINT
#include "rank_partition/cuda/rank_partition_gpu_kernel.cc"  // NOLINT
#include "recovery/cuda/recovery_gpu_kernel.cc"  // NOLINT
#include "segment_unique/cuda/segment_unique_gpu_kernel.cc"  // NOLINT
