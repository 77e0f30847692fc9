// Memory for large arrays: whole pages from the system, huge ones where it gives them, or pages of a file on disk.
//
// A table is read at random places. It mostly waits for memory, and in good part for address translation, which pages
// of 2 MiB make rare. Running out is an error to report, not a reason to be killed. Memory to take is first compared
// with the rest of the machine's or container's memory.
#pragma once

#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace fusedrec {

// Owns a mapping; zeros when it is new.
class Pages {
 public:
  Pages() = default;
  Pages(Pages&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Pages();

  // Memory, aligned to 2 MiB when it is that large.
  static absl::StatusOr<Pages> OfMemory(size_t bytes);
  // `bytes` of an open file from `offset` on, reserved on disk first. So a full disk is an error here and not a crash
  // at the first write.
  static absl::StatusOr<Pages> OfFile(int file, size_t offset, size_t bytes);

  char* data() const { return static_cast<char*>(data_); }
  size_t bytes() const { return bytes_; }
  void* Release() { return std::exchange(data_, nullptr); }

 private:
  Pages(void* data, size_t bytes) : data_(data), bytes_(bytes) {}
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Memory for many arrays that are read at random, most of them too small for pages of their own. Those share pages of
// 2 MiB. The size of an array is a power of two, 64 bytes or more, and its address a multiple of 64. Any thread.
absl::StatusOr<void*> TakeArray(size_t bytes);  // zeros
void GiveBackArray(void* array, size_t bytes);

// Asks for huge pages under a large buffer that nothing has touched yet. Its first writes then take one fault per 2 MiB
// instead of 512. Only a wish: pages at the ends that the buffer shares with others stay small.
void WantHugePages(void* data, size_t bytes);

}  // namespace fusedrec
