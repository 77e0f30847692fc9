// See older_runtimes.h.
#include <exception>

// Since GCC 11, copies and ends of a std::exception_ptr are inline, and call these two. Functions that all libstdc++ have
// do the same.
extern "C" {
void fusedrec_copy_exception_ptr(void* copy, const void* original);
void fusedrec_end_exception_ptr(void* pointer);
}
__asm__(".symver fusedrec_copy_exception_ptr, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
__asm__(".symver fusedrec_end_exception_ptr, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");

namespace std::__exception_ptr {
void exception_ptr::_M_addref() noexcept {
  void* never_ended;
  fusedrec_copy_exception_ptr(&never_ended, this);
}
void exception_ptr::_M_release() noexcept { fusedrec_end_exception_ptr(this); }
}  // namespace std::__exception_ptr
