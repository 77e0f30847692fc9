// States on their way between memory and the file.
#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "user_states/user_states.h"

namespace fusedrec {

absl::Status UserStates::OpenFile(const std::string& folder, int64_t max_bytes) {
  Lock lock(mutex_);
  if (file_ != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("the cache has a file already, so it cannot open another one in tier_folder '", folder,
                     "'. Remedy: open one file for each loaded model."));
  }
  auto file = StateFile::Make(folder, max_bytes, pool_->page_bytes(), state_bytes_);
  if (!file.ok()) return file.status();
  file_ = *std::move(file);
  return absl::OkStatus();
}

bool UserStates::TakePages(int64_t count, int64_t kept, Lock* lock, std::vector<Page>* pages) {
  while (Bytes() + count * pool_->page_bytes() > spec_.max_bytes) {
    const auto stays = [](const State& state) { return !state.leaves; };
    const auto oldest = std::find_if(states_.rbegin(), states_.rend(), stays);
    if (oldest != states_.rend() && oldest->revision != kept) {
      Evict(std::prev(oldest.base()), lock);
    } else if (leaving_ > 0) {
      WaitForMove(lock);
    } else {
      return false;
    }
  }
  for (; count > 0; --count) {
    pages->push_back(pool_->Take());
    if (pages->back() == nullptr) return false;
  }
  return true;
}

void UserStates::Evict(States::iterator state, Lock* lock) {
  const bool is_worth_it = state->of_user != nullptr && state->key.version == newest_version_;
  StateFile::Shared stored;
  if (file_ != nullptr && is_worth_it) stored = file_->Reserve(state->key, *state, state->used);
  if (stored != nullptr) {
    const Snapshot copy = *state;
    state->leaves = true;
    ++leaving_;
    lock->unlock();
    const bool written = WriteToFile(copy, stored.get());
    lock->lock();
    --leaving_;
    moved_.notify_all();
    const auto found = index_.find(stored->key);
    if (found == index_.end() || found->second->revision != copy.revision || !found->second->leaves) return;
    state = found->second;
    if (written) {
      file_->Insert(std::move(stored));
    } else {
      ++statistics_.tier_failures;
    }
  }
  ++statistics_.evictions;
  Leave(state);
}

const UserStates::State* UserStates::Bring(StateKey key, int64_t now, Lock* lock) {
  const StateFile::Shared stored = index_.count(key) > 0 ? nullptr : file_->Take(key);
  if (stored == nullptr) return nullptr;
  if (IsExpired(stored->used, now)) {
    ++statistics_.expirations;
    return nullptr;
  }
  arriving_[key] = stored;
  std::vector<Page> pages;
  const bool has_room = TakePages(stored->places.size(), 0, lock, &pages);
  bool is_whole = false;
  if (has_room) {
    lock->unlock();
    is_whole = file_->Read(*stored, pages);
    lock->lock();
  }
  const auto found = arriving_.find(key);
  if (found == arriving_.end() || found->second != stored) return nullptr;  // Forgotten or dropped meanwhile.
  arriving_.erase(found);
  moved_.notify_all();
  if (!has_room) {
    ++statistics_.no_room;
    file_->Insert(stored);
    return nullptr;
  }
  if (!is_whole) {
    ++statistics_.tier_failures;
    return nullptr;
  }
  ++statistics_.tier_hits;
  statistics_.tokens += stored->tokens;
  states_.emplace_front();
  State& state = states_.front();
  static_cast<Snapshot&>(state) = {stored->revision, stored->tokens, std::move(pages), stored->of_user};
  state.key = key;
  state.used = now;
  index_.emplace(key, states_.begin());
  return &state;
}

void UserStates::WaitForMove(Lock* lock) {
  // The call behind std::condition_variable::wait, which g++ 12 would take from a libstdc++ that older systems lack.
  pthread_cond_wait(moved_.native_handle(), lock->mutex()->native_handle());
}

}  // namespace fusedrec
