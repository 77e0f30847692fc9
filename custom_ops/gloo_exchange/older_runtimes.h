// Included before each source of the library, so that it loads with glibc 2.27 and the libstdc++ of GCC 8, as the ops do
// (common/older_runtimes.cc). These have the names below under an older version, or not at all (older_runtimes.cc).
#pragma once

#include <cstddef>  // which configures libstdc++

#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT  // of glibc 2.30; waits with a limit use the system's clock instead

#ifdef __x86_64__
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@GLIBC_2.2.5");
__asm__(".symver pthread_once, pthread_once@GLIBC_2.2.5");
__asm__(".symver pthread_setname_np, pthread_setname_np@GLIBC_2.12");
__asm__(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "
        "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif
