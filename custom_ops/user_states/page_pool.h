// Pages of equal size, at most a given number of them. A page that nobody holds is handed out again.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace fusedrec {

using Page = std::shared_ptr<char>;

// Any thread may call. A page keeps its pool alive, so a reader may outlive the cache.
class PagePool : public std::enable_shared_from_this<PagePool> {
 public:
  explicit PagePool(int64_t page_bytes) : page_bytes_(page_bytes) {}

  int64_t page_bytes() const { return page_bytes_; }
  // Pages that somebody holds.
  int64_t held() const;
  // A page with any content, or null where the machine has no memory.
  Page Take();

 private:
  void GiveBack(char* page);

  const int64_t page_bytes_;
  mutable std::mutex mutex_;  // guards the members below
  std::vector<std::unique_ptr<char[]>> free_;
  int64_t held_ = 0;
};

}  // namespace fusedrec
