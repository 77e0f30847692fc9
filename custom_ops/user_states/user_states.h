// A cache of user states: what a server keeps of a user's history between requests, such as keys and values of attention.
//
// A state has tokens, which only grow, and parts of the user, which each write replaces. A token has several parts, for
// example one per layer. Tokens lie in pages, part behind part in each page. An append fills the last page and takes new
// pages, so it copies no earlier token (the pages of vLLM's PagedAttention, Kwon et al. 2023).
//
// Concurrency. One mutex guards the index and is held for the bookkeeping only, never while tokens are copied:
// - A reader holds the pages of a Snapshot. An append writes behind the snapshot's tokens, so the reader never sees it.
// - Each write gives the state a revision that no state had before. An append names the revision that it extends. It
//   writes nothing where another request was quicker, or the state has left. One append at a time extends a state.
// - The state shows an append, or a new state, when all its tokens have arrived.
//
// Memory is bounded by max_bytes, pages of readers included. The state that was used least recently leaves first. Freed
// pages stay with the cache. With a file (OpenFile), a state that leaves goes there, if its version is the newest one. A
// find brings it back, with the same tokens and revision. A state is in memory or in the file, never in both:
// - While a state is written to the file it stays in memory, where a request may use it. It then stays there.
// - While a state is read, other requests of its user wait for it.
#pragma once

#include <condition_variable>
#include <limits>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/parallel.h"
#include "user_states/state_file.h"

namespace fusedrec {

struct UserStatesSpec {
  std::vector<int64_t> token_bytes;  // [P] of each part of a token
  std::vector<int64_t> user_bytes;   // [Q] of each part of a user
  int64_t page_tokens = 64;
  int64_t max_bytes = 0;
  int64_t ttl = 0;  // units of `now` after the last use; 0: none
};

// Counts since the cache was made, except those of states, tokens and bytes.
struct UserStatesStatistics {
  int64_t states, tokens, bytes;  // in memory
  int64_t hits, misses;           // finds; a hit may come from the file
  int64_t writes;                 // that took effect
  int64_t outrun;                 // appends to a state that has left or changed
  int64_t no_room;                // writes and reads of the file for which readers held too many pages, or no memory was
  int64_t evictions;              // states that left memory for others, to the file too
  int64_t expirations;
  int64_t tier_states, tier_bytes;  // in the file, at this moment
  int64_t tier_hits;                // states that came back
  int64_t tier_evictions;           // states that left the file for others, or found no room in it
  int64_t tier_failures;            // states that the disk did not take, or lost
};

class UserStates {
 public:
  static constexpr int64_t kStateBytes = 256;  // of a state, beside its pages and the parts of its user

  using Snapshot = StateSnapshot;
  // The content of a write: `tokens` tokens of each part, one behind another, and the parts of the user.
  struct Content {
    int64_t tokens;
    std::vector<const char*> of_tokens;  // [P]
    std::vector<const char*> of_user;    // [Q]
  };

  // InvalidArgument: a size is out of range, or max_bytes does not hold one page.
  static absl::StatusOr<std::unique_ptr<UserStates>> Make(const UserStatesSpec& spec);

  const UserStatesSpec& spec() const { return spec_; }

  // From now on, states that leave memory go to a file of at most max_bytes in `folder`. InvalidArgument: the folder
  // cannot be written, or max_bytes does not hold one page. FailedPrecondition: there is a file.
  absl::Status OpenFile(const std::string& folder, int64_t max_bytes);

  Snapshot Find(StateKey key, int64_t now);

  // Copies the tokens of all snapshots, one behind another. of_tokens: [P], room for the tokens of each part.
  void Read(absl::Span<const Snapshot> snapshots, absl::Span<char* const> of_tokens,
            const ParallelFor& parallel_for) const;

  // Appends to the state of this revision. With revision 0, a new state replaces any present one. Returns whether the
  // write took effect. ResourceExhausted: the state alone is larger than max_bytes.
  absl::StatusOr<bool> Write(StateKey key, int64_t revision, const Content& content, int64_t now,
                             const ParallelFor& parallel_for);

  // Drops the states of versions below `version`. Returns their number.
  int64_t Drop(int64_t version);

  UserStatesStatistics Statistics() const;

 private:
  struct State : Snapshot {
    StateKey key;
    int64_t used;         // when it was used last
    bool grows = false;   // a write copies its tokens; a new state has no `of_user` until then
    bool leaves = false;  // a request writes it to the file, and nobody has used it since
  };
  using States = std::list<State>;
  using Lock = std::unique_lock<std::mutex>;
  // Tokens of one page: `first` is their place in the page, `at` their place among all tokens that are copied.
  struct Run {
    const Page* page;
    int64_t first, count, at;
  };

  explicit UserStates(const UserStatesSpec& spec);

  void AddRuns(const std::vector<Page>& pages, int64_t begin, int64_t end, int64_t at, std::vector<Run>* runs) const;
  // Calls body(part, address in the page, byte of that part among all copied tokens, bytes) for each run and part.
  template <typename Body>
  void ForParts(const std::vector<Run>& runs, const ParallelFor& parallel_for, const Body& body) const;
  // Returns a state with pages for the new tokens, or revision 0 where nothing can be written.
  absl::StatusOr<Snapshot> Begin(StateKey key, int64_t revision, int64_t tokens, int64_t now);
  // Shows what was written, unless the state has left since Begin.
  bool Finish(StateKey key, Snapshot next);
  // Takes pages, for which states leave. The lock is open while one goes to the file. False: readers and the state with
  // the revision `kept` hold the rest.
  bool TakePages(int64_t count, int64_t kept, Lock* lock, std::vector<Page>* pages);
  void Evict(States::iterator state, Lock* lock);
  // Writes the pages of a state, without a lock. False: the disk does not take them.
  bool WriteToFile(const Snapshot& state, StateFile::Stored* stored) const;
  // Brings a state back from the file. Null: it is not there, or cannot come. The lock is open meanwhile.
  const State* Bring(StateKey key, int64_t now, Lock* lock);
  void WaitForMove(Lock* lock);
  // Counts as the use of a state. Null: no whole state is in memory.
  const State* Use(StateKey key, int64_t now);
  void Forget(StateKey key);
  bool IsExpired(int64_t used, int64_t now) const;
  void Expire(int64_t now);
  void Leave(States::iterator state);
  int64_t Bytes() const;

  const UserStatesSpec spec_;
  std::vector<int64_t> part_begin_;  // [P] of each part in a page
  int64_t state_bytes_;              // without pages
  std::shared_ptr<PagePool> pool_;

  mutable std::mutex mutex_;  // guards the members below
  States states_;             // the one used last in front
  std::unordered_map<StateKey, States::iterator, HashStateKey> index_;
  int64_t last_revision_ = 0;
  int64_t newest_version_ = std::numeric_limits<int64_t>::min();  // of all requests
  UserStatesStatistics statistics_{};

  std::unique_ptr<StateFile> file_;  // null: there is none
  // States that requests read from the file.
  std::unordered_map<StateKey, StateFile::Shared, HashStateKey> arriving_;
  int64_t leaving_ = 0;            // requests that write to the file
  std::condition_variable moved_;  // one has ended its way from or to the file
};

}  // namespace fusedrec
