// Pages of equal size, and the states of users that consist of them. A page without a user is handed out again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "common/hash.h"

namespace fusedrec {

using Page = std::shared_ptr<char>;

// Any thread may call. A page keeps its pool alive, so a reader may outlive the cache.
class PagePool : public std::enable_shared_from_this<PagePool> {
 public:
  explicit PagePool(int64_t page_bytes) : page_bytes_(page_bytes) {}

  int64_t page_bytes() const { return page_bytes_; }
  // Pages that somebody holds.
  int64_t held() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return held_;
  }
  // A page with any content, or null where the machine has no memory.
  Page Take() {
    std::unique_ptr<char[]> page;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        page = std::move(free_.back());
        free_.pop_back();
      }
      ++held_;
    }
    if (page == nullptr) page.reset(new (std::nothrow) char[page_bytes_]);
    if (page != nullptr) return Page(page.release(), [pool = shared_from_this()](char* p) { pool->GiveBack(p); });
    std::lock_guard<std::mutex> lock(mutex_);
    --held_;
    return nullptr;
  }

 private:
  void GiveBack(char* page) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.emplace_back(page);
    --held_;
  }

  const int64_t page_bytes_;
  mutable std::mutex mutex_;  // guards the members below
  std::vector<std::unique_ptr<char[]>> free_;
  int64_t held_ = 0;
};

// A key under which caches keep a state.
struct StateKey {
  int64_t user, version;
  bool operator==(const StateKey& other) const { return user == other.user && version == other.version; }
};

struct HashStateKey {
  size_t operator()(const StateKey& key) const {
    return Mix64(Mix64(static_cast<uint64_t>(key.user)) + static_cast<uint64_t>(key.version));
  }
};

// A state of a user at one moment. It stays as it is, whatever becomes of the state.
struct StateSnapshot {
  int64_t revision = 0;  // 0: there is no state
  int64_t tokens = 0;
  std::vector<Page> pages;
  std::shared_ptr<const std::vector<char>> of_user;  // the parts, one after another
};

}  // namespace fusedrec
