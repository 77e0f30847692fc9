#include "user_states/page_pool.h"

#include <new>
#include <utility>

namespace fusedrec {

int64_t PagePool::held() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return held_;
}

Page PagePool::Take() {
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

void PagePool::GiveBack(char* page) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.emplace_back(page);
  --held_;
}

}  // namespace fusedrec
