// Names the instruction set of the CPU kernels in use, for reports of users. The loader's choice among the functions of
// simd.h and the engines of jagged_attention ask the same question.
extern "C" __attribute__((visibility("default"))) const char* fusedrec_cpu_kernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("x86-64-v4")) return "AVX-512 (x86-64-v4)";
  if (__builtin_cpu_supports("x86-64-v3")) return "AVX2 (x86-64-v3)";
  return "SSE2 (x86-64)";
#elif defined(__aarch64__)
  return "Neon (aarch64)";
#else
  return "portable";
#endif
}
