// The tier below a cache's memory: states that left memory, in a file.
//
// The file has no name (common/scratch_file.h), so processes with one folder have separate files. It consists of pages
// of the size of the memory's pages. Keys, the parts of users and a checksum of each page stay in memory. A page that the
// disk does not take or give back, or that has other bytes, is no error: its state is lost, and computed again.
//
// max_bytes bounds the pages and, at state_bytes each, what stays in memory. The state that came first leaves first.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/hash.h"

namespace fusedrec {

// Pages of equal size, and the states of users that consist of them.
using Page = std::shared_ptr<char>;

// Any thread may call. A page keeps its pool alive, so a reader may outlive the cache.
class PagePool : public std::enable_shared_from_this<PagePool> {
 public:
  explicit PagePool(int64_t page_bytes) : page_bytes_(page_bytes) {}

  int64_t page_bytes() const { return page_bytes_; }
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

class StateFile {
 public:
  // A state in the file, or on its way there. Its places are taken as long as somebody holds it.
  struct Stored {
    StateKey key;
    int64_t revision, tokens, used;
    std::shared_ptr<const std::vector<char>> of_user;
    std::vector<int64_t> places;   // in the file, of each page
    std::vector<uint64_t> checks;  // of each page
  };
  using Shared = std::shared_ptr<Stored>;

  // InvalidArgument: the folder cannot be written, or max_bytes does not hold one page.
  static absl::StatusOr<std::unique_ptr<StateFile>> Make(const std::string& folder, int64_t max_bytes,
                                                         int64_t page_bytes, int64_t state_bytes);
  ~StateFile();

  // The caller's mutex guards these functions.
  // Takes places for a state, for which others leave. Null: it has no room.
  Shared Reserve(StateKey key, const StateSnapshot& state, int64_t used);
  // Makes a reserved state visible, when its pages are written. There is no other of its key.
  void Insert(Shared stored);
  // Takes the state of a key out of the file, or returns null.
  Shared Take(StateKey key);
  // Erases the states of versions below `version`. Returns their number.
  int64_t Drop(int64_t version);
  const Stored* oldest() const { return states_.empty() ? nullptr : states_.back().get(); }
  int64_t states() const { return states_.size(); }
  int64_t evictions() const { return evictions_; }

  // Any thread may call these functions, without a mutex.
  // False: the disk does not take the pages. pages: of whole size, one for each place.
  bool Write(const std::vector<const char*>& pages, Stored* stored) const;
  // False: the pages are not in the file as they were written.
  bool Read(const Stored& stored, const std::vector<Page>& pages) const;
  // Of pages that are taken, and of their states.
  int64_t bytes() const;

 private:
  using States = std::list<Shared>;

  StateFile(int file, int64_t max_bytes, int64_t page_bytes, int64_t state_bytes)
      : file_(file), max_bytes_(max_bytes), page_bytes_(page_bytes), state_bytes_(state_bytes) {}

  int64_t BytesOf(int64_t states, int64_t pages) const { return states * state_bytes_ + pages * page_bytes_; }
  void GiveBack(const Stored& stored);
  uint64_t Check(const Stored& stored, size_t page, const char* data) const;

  const int file_;
  const int64_t max_bytes_, page_bytes_, state_bytes_;

  // The caller's mutex guards these.
  States states_;  // the one that came last in front
  std::unordered_map<StateKey, States::iterator, HashStateKey> index_;
  int64_t evictions_ = 0;

  mutable std::mutex mutex_;  // guards the members below
  std::vector<int64_t> free_;
  int64_t places_ = 0;        // that the file has
  int64_t taken_states_ = 0;  // that somebody holds
};

}  // namespace fusedrec
