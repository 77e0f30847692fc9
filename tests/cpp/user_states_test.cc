// A cache of user states, with and without a file. Threads that read, extend, replace and drop the same states see whole
// states only. ThreadSanitizer watches the threads. A file that is cut, overwritten or full costs states, and nothing else.
// tests/ops/test_user_states.py compares random sequences with lists.
#include "user_states/user_states.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "common/hash.h"
#include "hash_table/folder.h"
#include "threads.h"

namespace fusedrec {
namespace {

constexpr int64_t kPageTokens = 4, kUserBytes = 8;
const std::vector<int64_t> kTokenBytes = {8, 0, 24};  // a layer may have no keys
constexpr int64_t kPageBytes = kPageTokens * 32, kStateBytes = UserStates::kStateBytes + kUserBytes;

UserStatesSpec Spec(int64_t pages, int64_t states, int64_t ttl) {
  return {kTokenBytes, {kUserBytes}, kPageTokens, pages * kPageBytes + states * kStateBytes, ttl};
}

std::unique_ptr<UserStates> MakeStates(const UserStatesSpec& spec) {
  auto states = UserStates::Make(spec);
  CHECK_OK(states.status());
  return *std::move(states);
}

// The numbers of a token are a function of its user, its version, the put that began the state, and its place.
struct Written {
  int64_t user, version, begun;

  uint64_t Number(int64_t place, int64_t column) const {
    return Mix64(Mix64(user * 1000 + version) + begun * 1'000'003 + place * 8 + column);
  }
  std::vector<uint64_t> Part(int64_t columns, int64_t from, int64_t tokens) const {
    std::vector<uint64_t> numbers;
    for (int64_t t = from; t < from + tokens; ++t) {
      for (int64_t c = 0; c < columns; ++c) numbers.push_back(Number(t, c + columns));
    }
    return numbers;
  }
};

// The part of a user is [begun : 32 | tokens : 32].
absl::StatusOr<bool> Write(UserStates* states, Written what, int64_t revision, int64_t before, int64_t tokens,
                           int64_t now, const ParallelFor& parallel_for = SerialFor) {
  const std::vector<uint64_t> narrow = what.Part(1, before, tokens), wide = what.Part(3, before, tokens);
  const int64_t of_user = what.begun << 32 | (before + tokens);
  const char* parts[] = {reinterpret_cast<const char*>(narrow.data()), reinterpret_cast<const char*>(wide.data())};
  return states->Write({what.user, what.version}, revision,
                       {tokens, {parts[0], parts[0], parts[1]}, {reinterpret_cast<const char*>(&of_user)}}, now,
                       parallel_for);
}

int64_t OfUser(const UserStates::Snapshot& snapshot) {
  int64_t of_user;
  std::copy(snapshot.of_user->begin(), snapshot.of_user->end(), reinterpret_cast<char*>(&of_user));
  return of_user;
}

// Checks every number of a snapshot, and returns what began the state.
int64_t CheckWhole(const UserStates& states, int64_t user, int64_t version, const UserStates::Snapshot& snapshot,
                   const ParallelFor& parallel_for = SerialFor) {
  const int64_t begun = OfUser(snapshot) >> 32;
  CHECK_EQ(OfUser(snapshot) & 0xffffffff, snapshot.tokens, "user ", user);
  std::vector<uint64_t> narrow(snapshot.tokens), wide(3 * snapshot.tokens);
  char* parts[] = {reinterpret_cast<char*>(narrow.data()), nullptr, reinterpret_cast<char*>(wide.data())};
  states.Read({snapshot}, parts, parallel_for);
  const Written what{user, version, begun};
  CHECK(narrow == what.Part(1, 0, snapshot.tokens), "user ", user, ", tokens ", snapshot.tokens);
  CHECK(wide == what.Part(3, 0, snapshot.tokens), "user ", user, ", tokens ", snapshot.tokens);
  return begun;
}

void SnapshotsStayAndAppendsCopyNothing() {
  const std::unique_ptr<UserStates> states = MakeStates(Spec(4, 1, 0));
  CHECK_OK(Write(states.get(), {1, 0, 7}, 0, 0, 6, 0).status());
  const UserStates::Snapshot first = states->Find({1, 0}, 0);
  CHECK(*Write(states.get(), {1, 0, 7}, first.revision, 6, 5, 0));
  const UserStates::Snapshot second = states->Find({1, 0}, 0);
  CHECK_EQ(second.tokens, 11);
  CHECK(std::equal(first.pages.begin(), first.pages.end(), second.pages.begin()));
  CHECK(!*Write(states.get(), {1, 0, 7}, first.revision, 6, 5, 0), "an append to a revision that is past");
  CHECK(*Write(states.get(), {1, 0, 8}, 0, 0, 1, 0));  // in place of the state
  CHECK(!*Write(states.get(), {1, 0, 7}, second.revision, 11, 5, 0), "an append to a state that was replaced");
  CHECK_EQ(CheckWhole(*states, 1, 0, first), 7);
  CHECK_EQ(CheckWhole(*states, 1, 0, second), 7);
  // Readers hold three pages and the state one. Another state finds no room, and the answer says so.
  CHECK(!*Write(states.get(), {2, 0, 9}, 0, 0, 8, 0));
  CHECK_EQ(states->Statistics().no_room, 1);
  CHECK_EQ(states->Find({2, 0}, 0).revision, 0);
  const absl::Status too_large = Write(states.get(), {3, 0, 1}, 0, 0, 40, 0).status();
  CHECK(absl::IsResourceExhausted(too_large));
  CHECK(too_large.ToString().find("the state of user 3 takes") != std::string::npos, "", too_large.ToString());
}

// A ParallelFor that lets other requests come while a write copies its tokens.
ParallelFor Meanwhile(const std::function<void()>& others) {
  return [others](int64_t total, int64_t, const std::function<void(int64_t, int64_t)>& body) {
    others();
    body(0, total);
  };
}

void OtherRequestsWhileAWriteCopies() {
  const std::unique_ptr<UserStates> states = MakeStates(Spec(40, 9, 0));
  const auto revision = [&] { return states->Find({1, 0}, 0).revision; };
  const auto append = [&](int64_t begun, const std::function<void()>& others) {
    const UserStates::Snapshot found = states->Find({1, 0}, 0);
    return *Write(states.get(), {1, 0, begun}, found.revision, found.tokens, 3, 0, Meanwhile(others));
  };
  // Nobody sees a new state before its tokens are there.
  CHECK(*Write(states.get(), {1, 0, 7}, 0, 0, 5, 0, Meanwhile([&] { CHECK_EQ(revision(), 0); })));
  // Readers see the old state, and no second append extends it.
  CHECK(append(7, [&] {
    const UserStates::Snapshot found = states->Find({1, 0}, 0);
    CHECK_EQ(found.tokens, 5);
    CheckWhole(*states, 1, 0, found);
    CHECK(!append(7, [] {}));
  }));
  CHECK_EQ(states->Find({1, 0}, 0).tokens, 8);
  // A state that was put meanwhile stays, and so does a drop.
  CHECK(!append(7, [&] { CHECK(*Write(states.get(), {1, 0, 8}, 0, 0, 2, 0)); }));
  const UserStates::Snapshot put = states->Find({1, 0}, 0);
  CHECK_EQ(CheckWhole(*states, 1, 0, put), 8);
  CHECK_EQ(put.tokens, 2);
  CHECK(!append(8, [&] { CHECK_EQ(states->Drop(1), 1); }));
  CHECK_EQ(revision(), 0);
  // Of two new states, the one that began last stays.
  CHECK(!*Write(states.get(), {1, 0, 9}, 0, 0, 5, 0,
                Meanwhile([&] { CHECK(*Write(states.get(), {1, 0, 10}, 0, 0, 1, 0)); })));
  CHECK_EQ(CheckWhole(*states, 1, 0, states->Find({1, 0}, 0)), 10);
  CHECK_EQ(states->Statistics().outrun, 4);
  CHECK_EQ(states->Statistics().tokens, 1);
}

void SnapshotsOutliveTheCache() {
  std::unique_ptr<UserStates> states = MakeStates(Spec(4, 3, 0));
  CHECK_OK(Write(states.get(), {1, 0, 7}, 0, 0, 6, 0).status());
  const UserStates::Snapshot snapshot = states->Find({1, 0}, 0);
  states.reset();
  const uint64_t number = *reinterpret_cast<const uint64_t*>(snapshot.pages[1].get() + 8);
  CHECK_EQ(number, (Written{1, 0, 7}.Part(1, 5, 1)[0]));
}

// A cache that holds one state of eight tokens in memory, and a file in `folder` for two.
std::unique_ptr<UserStates> WithFile(const std::string& folder) {
  std::unique_ptr<UserStates> states = MakeStates(Spec(2, 1, 0));
  CHECK_OK(states->OpenFile(folder, 2 * (2 * kPageBytes + kStateBytes)));
  return states;
}

void Put(UserStates* states, int64_t user, int64_t version = 0) {
  const absl::StatusOr<bool> written = Write(states, {user, version, user + 70}, 0, 0, 7, 0);
  CHECK_OK(written.status());
  CHECK(*written);
}

int64_t Tokens(UserStates* states, int64_t user, int64_t version = 0) {
  const UserStates::Snapshot found = states->Find({user, version}, 0);
  if (found.revision > 0) CHECK_EQ(CheckWhole(*states, user, version, found), user + 70);
  return found.tokens;
}

void AReaderHoldsThePagesThatAStateOfTheFileNeeds() {
  const Folder folder;
  const std::unique_ptr<UserStates> states = WithFile(folder.name()), other = WithFile(folder.name());
  for (const int64_t user : {1, 2}) Put(states.get(), user);  // 1 is in the file.
  {
    const UserStates::Snapshot found = states->Find({2, 0}, 0);
    CHECK_EQ(Tokens(states.get(), 1), 0, "a reader holds all pages");
    CHECK_EQ(states->Statistics().no_room, 1);
  }
  CHECK_EQ(Tokens(states.get(), 1), 7);
  CHECK_EQ(Tokens(states.get(), 2), 7);
  CHECK_EQ(other->Find({1, 0}, 0).revision, 0, "two caches have two files");
  CHECK_EQ(states->Statistics().tier_failures, 0);
}

// The open file of this process that lies in a folder.
int FileIn(const std::string& folder) {
  DIR* open = opendir("/proc/self/fd");
  CHECK(open != nullptr);
  int file = -1;
  for (dirent* entry = readdir(open); entry != nullptr; entry = readdir(open)) {
    char path[4096];
    const ssize_t length = readlink(absl::StrCat("/proc/self/fd/", entry->d_name).c_str(), path, sizeof(path));
    if (length > 0 && std::string(path, length).rfind(folder, 0) == 0) file = std::stoi(entry->d_name);
  }
  closedir(open);
  CHECK(file >= 0);
  return file;
}

void DamagedFiles() {
  const std::function<void(int)> damages[] = {
      [](int file) { CHECK_EQ(ftruncate(file, 0), 0); },
      [](int file) { CHECK_EQ(ftruncate(file, kPageBytes + 3), 0); },
      [](int file) {
        char byte;
        CHECK_EQ(pread(file, &byte, 1, kPageBytes + 3), 1);
        byte ^= 1;
        CHECK_EQ(pwrite(file, &byte, 1, kPageBytes + 3), 1);
      },
  };
  for (const std::function<void(int)>& damage : damages) {
    const Folder folder;
    const std::unique_ptr<UserStates> states = WithFile(folder.name());
    Put(states.get(), 1);
    Put(states.get(), 2);  // 1 is in the file.
    damage(FileIn(folder.name()));
    CHECK_EQ(Tokens(states.get(), 1), 0);
    CHECK_EQ(states->Statistics().tier_failures, 1);
    Put(states.get(), 1);
    CHECK_EQ(Tokens(states.get(), 2), 7);
    CHECK_EQ(Tokens(states.get(), 1), 7);
    CHECK_EQ(states->Statistics().tier_failures, 1);
  }
}

void FullDisk() {
  signal(SIGXFSZ, SIG_IGN);  // the system call fails instead
  rlimit limit;
  CHECK_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small = {kPageBytes + 10, limit.rlim_max};
  const Folder folder;
  const std::unique_ptr<UserStates> states = WithFile(folder.name());
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  for (const int64_t user : {1, 2, 3}) Put(states.get(), user);
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  CHECK_EQ(states->Statistics().tier_failures, 2);
  CHECK_EQ(states->Statistics().tier_bytes, 0);
  CHECK_EQ(Tokens(states.get(), 1), 0);
  CHECK_EQ(Tokens(states.get(), 3), 7);
  Put(states.get(), 4);
  CHECK_EQ(Tokens(states.get(), 3), 7);
}

// Requests of few users at once: each finds a state and extends it, or puts a new one, while states leave, to a file too.
void Requests(UserStatesSpec spec, int64_t users, int64_t tier_bytes = 0) {
  const std::unique_ptr<UserStates> states = MakeStates(spec);
  const Folder folder;
  if (tier_bytes > 0) CHECK_OK(states->OpenFile(folder.name(), tier_bytes));
  std::atomic<int64_t> begun{0}, written{0}, quicker{0}, clock{0};
  const auto serve = [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int request = 0; request < 1500; ++request) {
      const int64_t user = random() % users, version = random() % 2, now = ++clock;
      const int64_t tokens = 1 + random() % 6;
      const UserStates::Snapshot found = states->Find({user, version}, now);
      Written what{user, version, 0};
      if (found.revision > 0) what.begun = CheckWhole(*states, user, version, found);
      const bool puts = found.revision == 0 || found.tokens > 40;
      if (puts) what.begun = ++begun;
      const absl::StatusOr<bool> done = Write(states.get(), what, puts ? 0 : found.revision, puts ? 0 : found.tokens,
                                              tokens, now, request % 16 == 0 ? Threads(2) : SerialFor);
      CHECK_OK(done.status());
      ++(*done ? written : quicker);
      if (random() % 200 == 0) states->Drop(1);
      // While a state goes to the file, the entry of the state that comes is there, too.
      CHECK(states->Statistics().bytes <= spec.max_bytes + (tier_bytes > 0 ? 4 * kStateBytes : 0));
      CHECK(states->Statistics().tier_bytes <= tier_bytes);
    }
  };
  Threads(4)(4, 1, [&](int64_t begin, int64_t) { serve(begin); });
  const UserStatesStatistics statistics = states->Statistics();
  CHECK_EQ(statistics.writes, written.load());
  CHECK(statistics.outrun <= quicker.load() && statistics.outrun + statistics.no_room >= quicker.load());
  if (tier_bytes == 0) CHECK_EQ(statistics.outrun + statistics.no_room, quicker.load());
  if (tier_bytes > 0) CHECK(statistics.tier_hits > 100);
  CHECK_EQ(statistics.tier_failures, 0);
  CHECK_EQ(statistics.hits + statistics.misses, 6000);
  CHECK(statistics.writes > 100 && statistics.hits > 100);
}

}  // namespace
}  // namespace fusedrec

TEST(user_states) {
  using namespace fusedrec;
  SnapshotsStayAndAppendsCopyNothing();
  OtherRequestsWhileAWriteCopies();
  SnapshotsOutliveTheCache();
  Requests(Spec(400, 20, 0), 2);
  Requests(Spec(30, 20, 0), 6);
  Requests(Spec(60, 20, 8), 6);
  Requests(Spec(30, 20, 0), 6, 4 * (40 / kPageTokens * kPageBytes + kStateBytes));  // four states of 40 tokens
  Requests(Spec(30, 20, 40), 12, 1 << 20);
  AReaderHoldsThePagesThatAStateOfTheFileNeeds();
  DamagedFiles();
  FullDisk();
}
