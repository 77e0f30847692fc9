#include "hash_table/cpu/rows/pages.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <mutex>
#include <string>
#include <unordered_set>

#include "absl/strings/str_cat.h"

namespace fusedrec {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kReserve = size_t{256} << 20;  // left to everything else in the process

// Bytes that the machine can still give, by /proc/meminfo; the largest number when it does not tell.
size_t AvailableOnMachine() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  size_t kilobytes;
  while (file >> name >> kilobytes) {
    std::getline(file, unit);
    if (name == "MemAvailable:") return kilobytes * 1024;
  }
  return std::numeric_limits<size_t>::max();
}

// Bytes that the container can still take, by its control group (version 2); the largest number without a limit. Pages of
// files count as used there, but are given up for others.
size_t AvailableInContainer() {
  const std::string group = "/sys/fs/cgroup/memory.";
  std::ifstream limit_file(group + "max"), used_file(group + "current"), statistics(group + "stat");
  size_t limit, used, bytes, files = 0;
  if (!(limit_file >> limit) || !(used_file >> used)) return std::numeric_limits<size_t>::max();  // "max": no number
  for (std::string name; statistics >> name >> bytes;) {
    if (name == "active_file" || name == "inactive_file") files += bytes;
  }
  used -= std::min(used, files);
  return limit > used ? limit - used : 0;
}

}  // namespace

namespace {
// Free parts of shared pages, which are zeros. Parts are halved for a smaller array; two free halves are joined.
struct FreeParts {
  std::mutex mutex;
  std::unordered_set<uintptr_t> addresses[__builtin_ctzll(kHugePage)];  // by the binary logarithm of the size

  std::unordered_set<uintptr_t>& Of(size_t bytes) { return addresses[__builtin_ctzll(bytes)]; }
};
FreeParts& parts = *new FreeParts;  // tables may outlive static objects
}  // namespace

absl::StatusOr<void*> TakeArray(size_t bytes) {
  std::lock_guard<std::mutex> lock(parts.mutex);
  size_t size = bytes;
  while (size < kHugePage && parts.Of(size).empty()) size *= 2;
  uintptr_t address;
  if (size < kHugePage) {
    address = parts.Of(size).extract(parts.Of(size).begin()).value();
  } else {
    auto pages = Pages::OfMemory(size);
    if (!pages.ok()) return pages.status();
    address = reinterpret_cast<uintptr_t>(pages->Release());
  }
  while (size > bytes) {
    size /= 2;
    parts.Of(size).insert(address + size);
  }
  return reinterpret_cast<void*>(address);
}

void GiveBackArray(void* array, size_t bytes) {
  auto address = reinterpret_cast<uintptr_t>(array);
  if (bytes < kHugePage) {
    std::memset(array, 0, bytes);
    std::lock_guard<std::mutex> lock(parts.mutex);
    for (; bytes < kHugePage && parts.Of(bytes).erase(address ^ bytes) > 0; bytes *= 2) address &= ~bytes;
    if (bytes < kHugePage) parts.Of(bytes).insert(address);
  }
  if (bytes >= kHugePage) munmap(reinterpret_cast<void*>(address), bytes);
}

Pages::~Pages() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

absl::StatusOr<Pages> Pages::OfMemory(size_t bytes) {
  const size_t available = std::min(AvailableOnMachine(), AvailableInContainer());
  if (bytes + kReserve > available) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the embedding table needs ", bytes, " more bytes of memory, but ", available, " are available and ", kReserve,
        " of them are left to the rest of the process. What it holds stays readable. Remedy: max_rows_per_rank with an "
        "eviction policy, memory_budget_per_rank with a folder for the rows beyond it, a 16-bit storage.dtype, or more ranks."));
  }
  bytes = (bytes + kPage - 1) / kPage * kPage;
  // No mapping begins at a multiple of 2 MiB on request, so this takes more and gives the ends back.
  const size_t slack = bytes >= kHugePage ? kHugePage : 0;
  void* mapped = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the system gave the embedding table no more memory (", bytes, " bytes: ", std::strerror(errno),
        "). What it holds stays readable. Remedy: raise the limit (ulimit -v), or set max_rows_per_rank "
        "or memory_budget_per_rank."));
  }
  char* begin = static_cast<char*>(mapped);
  if (slack > 0) {
    const size_t lead = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
    if (lead > 0) munmap(begin, lead);
    if (slack > lead) munmap(begin + lead + bytes, slack - lead);
    begin += lead;
    WantHugePages(begin, bytes);
  }
  return Pages(begin, bytes);
}

void WantHugePages(void* data, size_t bytes) {
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (end >= begin + kHugePage) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

absl::StatusOr<Pages> Pages::OfFile(int file, size_t offset, size_t bytes) {
  const int error = posix_fallocate(file, offset, bytes);
  if (error != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("the file of rows beyond memory_budget_per_rank cannot grow by ",
        bytes, " bytes: ", std::strerror(error),
        ". What the table holds stays readable. Remedy: free disk space, or another tier.folder."));
  }
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, offset);
  if (mapped == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("the file of rows beyond memory_budget_per_rank cannot be mapped (", bytes,
                                                     " bytes: ", std::strerror(errno), ")."));
  }
  madvise(mapped, bytes, MADV_RANDOM);  // rows are read one by one; read-ahead would bring their neighbours
  return Pages(mapped, bytes);
}

}  // namespace fusedrec
