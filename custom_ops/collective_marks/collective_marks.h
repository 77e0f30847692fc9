// Marks of collectives: which ones this process has begun and ended, for a thread that watches over those that wait.
//
// A collective that waits for another rank says nothing by itself, and the thread that runs it is blocked. So a mark
// goes before and behind each: two atomic stores. Whoever wants to know reads all marks as text, at any time and from
// any thread, through the C functions below. Marks are made once per name and stay for the life of the process. Calls
// of one name never overlap: Horovod refuses a second collective of a name that is under way.
#ifndef FUSEDREC_COLLECTIVE_MARKS_COLLECTIVE_MARKS_H_
#define FUSEDREC_COLLECTIVE_MARKS_COLLECTIVE_MARKS_H_

#include <atomic>
#include <cstdint>
#include <string>

namespace fusedrec {

struct CollectiveMark {
  std::atomic<int64_t> begun{0}, ended{0};        // how often
  std::atomic<int64_t> begun_at{0}, ended_at{0};  // the last time, nanoseconds of a clock that never goes back
};

// The mark of a name; a new one when it is asked for first. Valid for ever.
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
// Writes DescribeMarks() into out when it has room for it; returns the number of bytes that it takes.
__attribute__((visibility("default"))) int64_t fusedrec_describe_marks(char* out, int64_t room);
}

#endif  // FUSEDREC_COLLECTIVE_MARKS_COLLECTIVE_MARKS_H_
