// The headers of TensorFlow that most sources of ops and kernels include. Reading them takes most of the time of such a
// source, so setup.py compiles them once and lets those sources begin with the result. No source includes this file.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"
