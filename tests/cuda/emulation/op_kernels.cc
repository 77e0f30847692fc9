// The OpKernels for a GPU as kernels for the CPU, over the emulated launchers: so TensorFlow runs their code without a
// device. They carry a label, by which a graph asks for them where a kernel for the CPU is registered, too.
#include "common/gpu_kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

#define Device(type) Device(::tensorflow::DEVICE_CPU).Label("emulated")  // NOLINT
#define StreamOf(ctx) (static_cast<void>(ctx), static_cast<void*>(nullptr))

#include "hash_table/hash_table_admin_gpu_kernel.cc"        // NOLINT
#include "hash_table/hash_table_gpu_kernel.cc"              // NOLINT
#include "jagged_attention/bias_attention_gpu_kernel.cc"     // NOLINT
#include "jagged_attention/jagged_attention_gpu_kernel.cc"  // NOLINT
#include "rank_partition/rank_partition_gpu_kernel.cc"      // NOLINT
#include "recovery/recovery_gpu_kernel.cc"                  // NOLINT
#include "segment_unique/segment_unique_gpu_kernel.cc"      // NOLINT

// What of the op library these call: its names are hidden.
#include "hash_table/optimizer.cc"           // NOLINT
#include "hash_table/row_format.cc"          // NOLINT
#include "initial_rows/initial_rows.cc"      // NOLINT
#include "jagged_attention/validation.cc"    // NOLINT
#include "rank_partition/rank_partition.cc"  // NOLINT
#include "recovery/recovery.cc"              // NOLINT
