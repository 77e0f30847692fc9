// Loops for the vector units of the machine that runs them.
//
// The library is compiled for the oldest machine of its architecture (no -march). A function marked FUSEDREC_CLONES is
// compiled three times, for AVX-512, for AVX2 and for the baseline. The loader picks once, when the library is loaded.
// Mark free functions whose loops the compiler can vectorize (__restrict__ pointers, no calls that are not inlined). A
// call must cover a row or more, because the loader's table costs some cycles.
//
// All three give the same bits. setup.py compiles with -ffp-contract=off, so no product and sum become one fused
// operation. Sums are written with a fixed number of partial sums.
#pragma once

// Sanitizers: the loader picks before their runtime is ready, and what picks is instrumented too. GCC has no macro for
// -fsanitize=undefined; such builds pass -DFUSEDREC_NO_CLONES.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !defined(FUSEDREC_NO_CLONES)
#define FUSEDREC_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FUSEDREC_CLONES
#endif
