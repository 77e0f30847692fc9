// Keeps the exception that makes C++ end this process. A Python thread reports it; if that thread cannot, this file does.
//
// With process sets, Horovod's thread throws when it loses a rank, and nothing catches the exception. C++ then calls the
// handler of std::terminate and aborts, so Python never hears of it. The handler here runs no Python, because another
// thread may hold the interpreter's lock for ever. It keeps the exception's text, and waits for the watchdog, which polls
// fusedrec_termination, asks the other ranks for the cause, and ends the process. If the time limit passes first, the
// handler writes one line and ends the process with code 1.
#include "collective_marks/collective_marks.h"

#include <cxxabi.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>

namespace fusedrec {
namespace {

constexpr int64_t kRoom = 512;

// Nothing here is allocated or destroyed: the process may be out of memory, or at its exit.
char cause[kRoom];
std::atomic_flag entered = ATOMIC_FLAG_INIT;
std::atomic<bool> ending{false};
int rank_of_process = 0;
double limit_s = 0;
pid_t process = 0;
std::terminate_handler before = nullptr;

void KeepCause() {
  std::snprintf(cause, kRoom, "no exception");
  // Not std::current_exception, which older C++ runtimes do not export in the form that new headers call.
  if (abi::__cxa_current_exception_type() == nullptr) return;
  try {
    throw;
  } catch (const std::exception& exception) {
    std::snprintf(cause, kRoom, "%s", exception.what());
  } catch (...) {
    std::snprintf(cause, kRoom, "an exception without a text");
  }
}

void OnTerminate() {
  if (getpid() != process) {
    if (before != nullptr) before();
    std::abort();
  }
  // A second thread waits for the first one to end the process.
  if (!entered.test_and_set()) {
    KeepCause();
    ending.store(true, std::memory_order_release);
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(limit_s));
  char line[kRoom + 128];
  const int size = std::snprintf(line, sizeof(line),
                                 "tf_fusedrec: rank %d: a thread of C++ ends this process: %s. Remedy: the rank that ended "
                                 "first says why, or it was killed.\n",
                                 rank_of_process, cause);
  const ssize_t written = write(STDERR_FILENO, line, static_cast<size_t>(size));
  _exit(written < 0 ? 2 : 1);
}

}  // namespace
}  // namespace fusedrec

void fusedrec_watch_termination(int rank, double within_s) {
  fusedrec::rank_of_process = rank;
  fusedrec::limit_s = within_s;
  fusedrec::process = getpid();
  const std::terminate_handler found = std::set_terminate(fusedrec::OnTerminate);
  if (found != fusedrec::OnTerminate) fusedrec::before = found;
}

int fusedrec_termination(char* out, int64_t room) {
  if (!fusedrec::ending.load(std::memory_order_acquire)) return 0;
  std::snprintf(out, static_cast<size_t>(room), "%s", fusedrec::cause);
  return 1;
}
