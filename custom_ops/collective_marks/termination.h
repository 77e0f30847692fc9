// Keeps the exception for which C++ ends this process. A thread of Python says it, or this file if that thread cannot.
//
// Horovod's thread throws where it loses a rank and there are sets of ranks, and nothing catches. C++ then calls the
// handler of std::terminate and aborts, so Python never hears of it. The handler here runs no Python, because another
// thread may hold the interpreter's lock for ever. It keeps the exception's text, and waits for the watchdog, which polls
// fusedrec_termination, asks the other ranks for the cause, and ends the process. If the time limit passes first, the
// handler writes one line and ends the process with code 1.
#pragma once

#include <cstdint>

extern "C" {
// Installs the handler for this process. A forked child keeps the handler that was there before.
//   rank: Rank of this process, for the line.
//   within_s: Seconds that the watchdog has.
__attribute__((visibility("default"))) void fusedrec_watch_termination(int rank, double within_s);
// Copies the exception's text, at most `room` bytes with a zero at the end. Returns 1 when the process is ending, else 0.
__attribute__((visibility("default"))) int fusedrec_termination(char* out, int64_t room);
}
