// The tier below a cache's memory: states that left memory, in a file.
//
// The file has no name (common/scratch_file.h), so processes with one folder have separate files. It consists of pages
// of the size of the memory's pages. Keys, the parts of users and a checksum of each page stay in memory. A page that the
// disk does not take or give back, or that has other bytes, is no error: its state is lost, and computed again.
//
// max_bytes bounds the pages and, at state_bytes each, what stays in memory. The state that came first leaves first.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "user_states/page_pool.h"

namespace fusedrec {

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
  //
  // Takes places for a state, which leaves to others as much as it needs. Null: it has no room.
  Shared Reserve(StateKey key, const StateSnapshot& state, int64_t used);
  // Makes a reserved state visible, when its pages are written. There is no other of its key.
  void Insert(Shared stored);
  // Takes the state of a key out of the file, or returns null.
  Shared Take(StateKey key);
  // Erases the states of versions below `version`. Returns their number.
  int64_t Drop(int64_t version);
  // The state that came first, or null.
  const Stored* oldest() const { return states_.empty() ? nullptr : states_.back().get(); }
  int64_t states() const { return states_.size(); }
  int64_t evictions() const { return evictions_; }

  // Any thread may call these functions, without a mutex.
  //
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
