// Functions that the CPU and the GPU share, bit for bit.
#pragma once

#if defined(__CUDACC__)
#define FUSEDREC_HOST_DEVICE __host__ __device__
#else
#define FUSEDREC_HOST_DEVICE
#endif
