// Functions that the CPU and the GPU share, bit for bit.
#ifndef FUSEDREC_COMMON_HOST_DEVICE_H_
#define FUSEDREC_COMMON_HOST_DEVICE_H_

#if defined(__CUDACC__)
#define FUSEDREC_HOST_DEVICE __host__ __device__
#else
#define FUSEDREC_HOST_DEVICE
#endif

#endif  // FUSEDREC_COMMON_HOST_DEVICE_H_
