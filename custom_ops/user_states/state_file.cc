#include "user_states/state_file.h"

#include "common/limits.h"
#include "common/scratch_file.h"
#include "common/try.h"

namespace fusedrec {

namespace {

template <typename Call, typename Data>
bool Transfer(const Call& call, Data* data, int64_t bytes, int64_t offset) {
  while (bytes > 0) {
    const ssize_t done = call(data, bytes, offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    data += done;
    bytes -= done;
    offset += done;
  }
  return true;
}

// A checksum that changes with each changed word: every step is a bijection of its lane. The lanes run side by side.
uint64_t Checksum(const char* data, int64_t bytes, uint64_t seed) {
  constexpr int kLanes = 4;
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15ULL;
  uint64_t lanes[kLanes] = {seed, seed + 1, seed + 2, seed + 3};
  const auto add = [&](const uint64_t* words) {
    for (int n = 0; n < kLanes; ++n) {
      const uint64_t mixed = (lanes[n] ^ words[n]) * kOdd;
      lanes[n] = mixed << 31 | mixed >> 33;
    }
  };
  uint64_t words[kLanes] = {};
  for (; bytes >= static_cast<int64_t>(sizeof(words)); bytes -= sizeof(words), data += sizeof(words)) {
    std::memcpy(words, data, sizeof(words));
    add(words);
  }
  std::memset(words, 0, sizeof(words));
  if (bytes > 0) std::memcpy(words, data, bytes);
  add(words);
  uint64_t sum = 0;
  for (const uint64_t lane : lanes) sum = Mix64(sum ^ lane);
  return sum;
}

}  // namespace

absl::StatusOr<std::unique_ptr<StateFile>> StateFile::Make(const std::string& folder, int64_t max_bytes,
                                                           int64_t page_bytes, int64_t state_bytes) {
  FUSEDREC_TRY(RequireIn("tier_bytes", max_bytes, state_bytes + page_bytes, kMostCount,
                         "room for one page at least; better for many whole states."));
  const auto file = OpenScratchFile(folder, "states");
  if (!file.ok()) return file.status();
  return std::unique_ptr<StateFile>(new StateFile(*file, max_bytes, page_bytes, state_bytes));
}

StateFile::~StateFile() {
  index_.clear();
  states_.clear();
  close(file_);
}

StateFile::Shared StateFile::Reserve(StateKey key, const StateSnapshot& state, int64_t used) {
  const int64_t pages = state.pages.size(), needed = BytesOf(1, pages);
  if (needed > max_bytes_) {
    ++evictions_;
    return nullptr;
  }
  while (bytes() + needed > max_bytes_) {
    ++evictions_;
    if (states_.empty()) return nullptr;  // Readers and writers of other requests hold the rest.
    index_.erase(states_.back()->key);
    states_.pop_back();
  }
  Shared stored(new Stored{key, state.revision, state.tokens, used, state.of_user, {}, {}}, [this](Stored* gone) {
    GiveBack(*gone);
    delete gone;
  });
  stored->checks.resize(pages);
  std::lock_guard<std::mutex> lock(mutex_);
  ++taken_states_;
  for (int64_t n = 0; n < pages; ++n) {
    if (free_.empty()) free_.push_back(places_++);
    stored->places.push_back(free_.back());
    free_.pop_back();
  }
  return stored;
}

void StateFile::Insert(Shared stored) {
  const StateKey key = stored->key;
  states_.push_front(std::move(stored));
  index_[key] = states_.begin();
}

StateFile::Shared StateFile::Take(StateKey key) {
  const auto found = index_.find(key);
  if (found == index_.end()) return nullptr;
  const Shared taken = std::move(*found->second);
  states_.erase(found->second);
  index_.erase(found);
  return taken;
}

int64_t StateFile::Drop(int64_t version) {
  const size_t before = states_.size();
  for (auto state = states_.begin(); state != states_.end();) {
    const StateKey key = (*state++)->key;
    if (key.version < version) Take(key);
  }
  return before - states_.size();
}

bool StateFile::Write(const std::vector<const char*>& pages, Stored* stored) const {
  const auto write = [&](const char* data, size_t bytes, off_t at) { return pwrite(file_, data, bytes, at); };
  for (size_t n = 0; n < pages.size(); ++n) {
    stored->checks[n] = Check(*stored, n, pages[n]);
    if (!Transfer(write, pages[n], page_bytes_, stored->places[n] * page_bytes_)) return false;
  }
  return true;
}

bool StateFile::Read(const Stored& stored, const std::vector<Page>& pages) const {
  const auto read = [&](char* data, size_t bytes, off_t at) { return pread(file_, data, bytes, at); };
  for (size_t n = 0; n < pages.size(); ++n) {
    if (!Transfer(read, pages[n].get(), page_bytes_, stored.places[n] * page_bytes_)) return false;
    if (Check(stored, n, pages[n].get()) != stored.checks[n]) return false;
  }
  return true;
}

uint64_t StateFile::Check(const Stored& stored, size_t page, const char* data) const {
  // With the revision, so that the page of another state has another checksum.
  return Checksum(data, page_bytes_, Mix64(stored.revision) + page);
}

int64_t StateFile::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return BytesOf(taken_states_, places_ - static_cast<int64_t>(free_.size()));
}

void StateFile::GiveBack(const Stored& stored) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.insert(free_.end(), stored.places.begin(), stored.places.end());
  --taken_states_;
}

}  // namespace fusedrec
