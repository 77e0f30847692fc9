// Names of newer C and C++ runtimes that the headers of newer compilers refer to. Defined here, they let the library
// load with glibc 2.27 and the libstdc++ of GCC 8 (manylinux_2_27). A runtime that has them comes first.
#include <new>

// glibc 2.32. libstdc++ counts references without atomic operations while it is true.
extern "C" {
__attribute__((visibility("default"))) char __libc_single_threaded = 0;
}

// GCC 11. Thrown by new-expressions of a negative or too large length.
namespace std {
[[noreturn]] __attribute__((visibility("default"))) void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
