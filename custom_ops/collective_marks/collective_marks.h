// Marks of the collectives that this process has begun and ended, for a thread that watches the waiting ones.
//
// A collective that waits for another rank blocks its thread and reports nothing. So two atomic stores mark the begin and
// the end of each collective. The C functions below return all marks as text, at any time and to any thread. A mark is made
// once per name and lives as long as the process. Calls of one name never overlap, because Horovod refuses a second
// collective of a running name.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace fusedrec {

struct CollectiveMark {
  std::atomic<int64_t> begun{0}, ended{0};        // number of times
  std::atomic<int64_t> begun_at{0}, ended_at{0};  // last time, nanoseconds of a steady clock
};

// Returns the mark of a name, and makes it at the first call. Valid for the life of the process.
CollectiveMark* MarkOf(const std::string& name);

void Begin(CollectiveMark* mark);
void End(CollectiveMark* mark);

// One line per mark, in the order of their names: "name\tbegun\tended\tage of begun_at\tage of ended_at\n", ages in
// milliseconds, -1 for never.
std::string DescribeMarks();

}  // namespace fusedrec

extern "C" {
// Marks the begin (ended = 0) or the end (1) of a collective.
__attribute__((visibility("default"))) void fusedrec_mark_collective(const char* name, int ended);
// Writes DescribeMarks() into `out` if it has room. Returns the number of bytes of the text.
__attribute__((visibility("default"))) int64_t fusedrec_describe_marks(char* out, int64_t room);

// Installs the handler of termination.cc for this process. A forked child keeps the handler that was there before.
//   rank: Rank of this process, which the error line names.
//   within_s: Seconds that the watchdog has.
__attribute__((visibility("default"))) void fusedrec_watch_termination(int rank, double within_s);
// Copies the exception's text, at most `room` bytes with a zero at the end. Returns 1 when the process is ending, else 0.
__attribute__((visibility("default"))) int fusedrec_termination(char* out, int64_t room);
}
