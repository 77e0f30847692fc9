#include "user_states/user_states.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>

#include "common/limits.h"
#include "common/try.h"

namespace fusedrec {

namespace {

constexpr int64_t kMostPageTokens = 4096;
constexpr int64_t kMostParts = 1024;
constexpr int64_t kMostPartBytes = kMostColumns * 8;

int64_t Sum(const std::vector<int64_t>& numbers) { return std::accumulate(numbers.begin(), numbers.end(), int64_t{0}); }

absl::Status RequireParts(const std::string& name, const std::vector<int64_t>& bytes, int64_t least) {
  FUSEDREC_TRY(RequireIn(absl::StrCat("the number of ", name).c_str(), bytes.size(), least, kMostParts,
                         "one part per layer and kind."));
  for (size_t p = 0; p < bytes.size(); ++p) {
    FUSEDREC_TRY(RequireIn(absl::StrCat("bytes of ", name, " ", p).c_str(), bytes[p], 0, kMostPartBytes,
                           "fewer columns."));
  }
  return absl::OkStatus();
}

int64_t PagesFor(int64_t tokens, int64_t page_tokens) { return (tokens + page_tokens - 1) / page_tokens; }

}  // namespace

absl::StatusOr<std::unique_ptr<UserStates>> UserStates::Make(const UserStatesSpec& spec) {
  FUSEDREC_TRY(RequireParts("token parts", spec.token_bytes, 1));
  FUSEDREC_TRY(RequireParts("user parts", spec.user_bytes, 0));
  FUSEDREC_TRY(RequireIn("page_tokens", spec.page_tokens, 1, kMostPageTokens, "the default, 64."));
  FUSEDREC_TRY(RequireIn("ttl", spec.ttl, 0, kMostCount, "a time in seconds, or 0 for none."));
  std::unique_ptr<UserStates> states(new UserStates(spec));
  FUSEDREC_TRY(RequireIn("max_bytes", spec.max_bytes, states->state_bytes_ + states->pool_->page_bytes(), kMostCount,
                         "room for one page at least, smaller pages, or fewer columns."));
  return states;
}

UserStates::UserStates(const UserStatesSpec& spec)
    : spec_(spec), state_bytes_(kStateBytes + Sum(spec.user_bytes)),
      pool_(std::make_shared<PagePool>(spec.page_tokens * Sum(spec.token_bytes))) {
  int64_t begin = 0;
  for (const int64_t bytes : spec.token_bytes) {
    part_begin_.push_back(begin);
    begin += bytes * spec.page_tokens;
  }
}

UserStates::Snapshot UserStates::Find(StateKey key, int64_t now) {
  Lock lock(mutex_);
  newest_version_ = std::max(newest_version_, key.version);
  Expire(now);
  while (arriving_.count(key) > 0) WaitForMove(&lock);
  const State* found = Use(key, now);
  if (found == nullptr && file_ != nullptr) found = Bring(key, now, &lock);
  ++(found == nullptr ? statistics_.misses : statistics_.hits);
  return found == nullptr ? Snapshot{} : static_cast<const Snapshot&>(*found);
}

const UserStates::State* UserStates::Use(StateKey key, int64_t now) {
  const auto found = index_.find(key);
  if (found == index_.end()) return nullptr;
  if (IsExpired(found->second->used, now)) {
    ++statistics_.expirations;
    Leave(found->second);
    return nullptr;
  }
  if (found->second->of_user == nullptr) return nullptr;
  states_.splice(states_.begin(), states_, found->second);
  states_.front().used = now;
  states_.front().leaves = false;
  return &states_.front();
}

void UserStates::AddRuns(const std::vector<Page>& pages, int64_t begin, int64_t end, int64_t at,
                         std::vector<Run>* runs) const {
  for (int64_t token = begin; token < end;) {
    const int64_t page = token / spec_.page_tokens, first = token % spec_.page_tokens;
    const int64_t count = std::min(spec_.page_tokens - first, end - token);
    runs->push_back({&pages[page], first, count, at + token - begin});
    token += count;
  }
}

template <typename Body>
void UserStates::ForParts(const std::vector<Run>& runs, const ParallelFor& parallel_for, const Body& body) const {
  parallel_for(runs.size(), pool_->page_bytes(), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const Run& run = runs[r];
      for (size_t p = 0; p < spec_.token_bytes.size(); ++p) {
        const int64_t bytes = spec_.token_bytes[p];
        if (bytes > 0) body(p, run.page->get() + part_begin_[p] + run.first * bytes, run.at * bytes, run.count * bytes);
      }
    }
  });
}

void UserStates::Read(absl::Span<const Snapshot> snapshots, absl::Span<char* const> of_tokens,
                      const ParallelFor& parallel_for) const {
  std::vector<Run> runs;
  int64_t at = 0;
  for (const Snapshot& snapshot : snapshots) {
    AddRuns(snapshot.pages, 0, snapshot.tokens, at, &runs);
    at += snapshot.tokens;
  }
  ForParts(runs, parallel_for, [&](size_t part, char* in_page, int64_t at, int64_t bytes) {
    std::memcpy(of_tokens[part] + at, in_page, bytes);
  });
}

absl::StatusOr<bool> UserStates::Write(StateKey key, int64_t revision, const Content& content, int64_t now,
                                       const ParallelFor& parallel_for) {
  auto begun = Begin(key, revision, content.tokens, now);
  if (!begun.ok()) return begun.status();
  Snapshot& next = *begun;
  if (next.revision == 0) return false;

  std::vector<Run> runs;
  AddRuns(next.pages, next.tokens - content.tokens, next.tokens, 0, &runs);
  ForParts(runs, parallel_for, [&](size_t part, char* in_page, int64_t at, int64_t bytes) {
    std::memcpy(in_page, content.of_tokens[part] + at, bytes);
  });
  auto of_user = std::make_shared<std::vector<char>>();
  for (size_t q = 0; q < content.of_user.size(); ++q) {
    of_user->insert(of_user->end(), content.of_user[q], content.of_user[q] + spec_.user_bytes[q]);
  }
  next.of_user = std::move(of_user);
  return Finish(key, std::move(next));
}

absl::StatusOr<UserStates::Snapshot> UserStates::Begin(StateKey key, int64_t revision, int64_t tokens, int64_t now) {
  Lock lock(mutex_);
  newest_version_ = std::max(newest_version_, key.version);
  Expire(now);
  if (revision == 0) Forget(key);
  auto found = index_.find(key);
  if (revision != 0 && (found == index_.end() || found->second->revision != revision || found->second->grows)) {
    ++statistics_.outrun;
    return Snapshot{};
  }
  const int64_t before = revision == 0 ? 0 : found->second->tokens;
  const int64_t pages = PagesFor(before + tokens, spec_.page_tokens), bytes = pages * pool_->page_bytes() + state_bytes_;
  if (bytes > spec_.max_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("the state of user ", key.user, " takes ", bytes, " bytes for ",
        before + tokens, " tokens, more than the whole cache: max_bytes = ", spec_.max_bytes,
        ". Remedy: raise max_bytes, or keep shorter histories."));
  }
  if (revision == 0) {
    states_.emplace_front();
    states_.front().key = key;
    states_.front().revision = ++last_revision_;
    found = index_.emplace(key, states_.begin()).first;
  }
  states_.splice(states_.begin(), states_, found->second);
  State& state = states_.front();
  state.used = now;
  state.grows = true;
  state.leaves = false;
  Snapshot next = state;
  next.tokens = before + tokens;
  const int64_t more = pages - static_cast<int64_t>(next.pages.size());
  if (TakePages(more, next.revision, &lock, &next.pages)) return next;
  ++statistics_.no_room;
  found = index_.find(key);
  if (found != index_.end() && found->second->revision == next.revision) {
    found->second->grows = false;
    if (revision == 0) Leave(found->second);
  }
  return Snapshot{};
}

bool UserStates::Finish(StateKey key, Snapshot next) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = index_.find(key);
  if (found == index_.end() || found->second->revision != next.revision) {
    ++statistics_.outrun;
    return false;
  }
  State& state = *found->second;
  statistics_.tokens += next.tokens - state.tokens;
  static_cast<Snapshot&>(state) = std::move(next);
  state.revision = ++last_revision_;
  state.grows = false;
  ++statistics_.writes;
  return true;
}

bool UserStates::WriteToFile(const Snapshot& state, StateFile::Stored* stored) const {
  std::vector<const char*> pages;
  for (const Page& page : state.pages) pages.push_back(page.get());
  // An append may write behind the tokens of the last page.
  const int64_t in_last = state.tokens % spec_.page_tokens;
  std::vector<char> last;
  if (in_last > 0) {
    last.resize(pool_->page_bytes());
    std::vector<Run> runs;
    AddRuns(state.pages, state.tokens - in_last, state.tokens, 0, &runs);
    ForParts(runs, SerialFor, [&](size_t part, const char* in_page, int64_t, int64_t bytes) {
      std::memcpy(&last[part_begin_[part]], in_page, bytes);
    });
    pages.back() = last.data();
  }
  return file_->Write(pages, stored);
}

bool UserStates::IsExpired(int64_t used, int64_t now) const {
  // Unsigned, because the difference of two times may exceed int64.
  const uint64_t age = static_cast<uint64_t>(now) - static_cast<uint64_t>(used);
  return spec_.ttl > 0 && now > used && age > static_cast<uint64_t>(spec_.ttl);
}

void UserStates::Expire(int64_t now) {
  for (; !states_.empty() && IsExpired(states_.back().used, now); Leave(std::prev(states_.end()))) {
    ++statistics_.expirations;
  }
  if (file_ == nullptr) return;
  for (; file_->oldest() != nullptr && IsExpired(file_->oldest()->used, now); file_->Take(file_->oldest()->key)) {
    ++statistics_.expirations;
  }
}

void UserStates::Forget(StateKey key) {
  const auto found = index_.find(key);
  if (found != index_.end()) Leave(found->second);
  if (arriving_.erase(key) > 0) moved_.notify_all();
  if (file_ != nullptr) file_->Take(key);
}

void UserStates::Leave(States::iterator state) {
  statistics_.tokens -= state->tokens;
  index_.erase(state->key);
  states_.erase(state);
}

int64_t UserStates::Drop(int64_t version) {
  Lock lock(mutex_);
  newest_version_ = std::max(newest_version_, version);
  int64_t dropped = file_ == nullptr ? 0 : file_->Drop(version);
  for (auto state = arriving_.begin(); state != arriving_.end();) {
    const bool is_old = state->first.version < version;
    state = is_old ? arriving_.erase(state) : std::next(state);
    dropped += is_old;
  }
  for (auto state = states_.begin(); state != states_.end();) {
    const auto next = std::next(state);
    if (state->key.version < version) {
      Leave(state);
      ++dropped;
    }
    state = next;
  }
  moved_.notify_all();
  return dropped;
}

int64_t UserStates::Bytes() const {
  const int64_t states = states_.size() + arriving_.size();
  return pool_->held() * pool_->page_bytes() + states * state_bytes_;
}

UserStatesStatistics UserStates::Statistics() const {
  Lock lock(mutex_);
  UserStatesStatistics statistics = statistics_;
  statistics.states = states_.size();
  statistics.bytes = Bytes();
  if (file_ != nullptr) {
    statistics.tier_states = file_->states();
    statistics.tier_bytes = file_->bytes();
    statistics.tier_evictions = file_->evictions();
  }
  return statistics;
}

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
