#include "collective_marks/collective_marks.h"

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>

namespace fusedrec {
namespace {

struct Registry {
  std::mutex mutex;  // of the map; a mark itself needs none
  std::map<std::string, CollectiveMark> marks;
};

// Never destroyed: kernels may run until the process is gone.
Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

CollectiveMark* MarkOf(const std::string& name) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  return &registry.marks[name];
}

void Begin(CollectiveMark* mark) {
  const int64_t before = mark->begun.load();
  mark->ended.store(before);  // also a call before that has failed, and so never came to its end
  mark->begun_at.store(Now());
  mark->begun.store(before + 1);
}

void End(CollectiveMark* mark) {
  mark->ended_at.store(Now());
  mark->ended.store(mark->begun.load());
}

std::string DescribeMarks() {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const int64_t now = Now();
  const auto age = [now](int64_t at) { return at == 0 ? std::string("-1") : std::to_string((now - at) / 1000000); };
  std::string text;
  for (const auto& [name, mark] : registry.marks) {
    const int64_t ended = mark.ended.load(), begun = mark.begun.load();  // in this order: ended <= begun
    text += name + '\t' + std::to_string(begun) + '\t' + std::to_string(ended) + '\t' + age(mark.begun_at.load()) +
            '\t' + age(mark.ended_at.load()) + '\n';
  }
  return text;
}

}  // namespace fusedrec

void fusedrec_mark_collective(const char* name, int ended) {
  (ended ? fusedrec::End : fusedrec::Begin)(fusedrec::MarkOf(name));
}

int64_t fusedrec_describe_marks(char* out, int64_t room) {
  const std::string text = fusedrec::DescribeMarks();
  if (static_cast<int64_t>(text.size()) <= room) std::memcpy(out, text.data(), text.size());
  return static_cast<int64_t>(text.size());
}
