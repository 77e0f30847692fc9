// When memory or the disk ends, an insertion fails with words, and everything that the table holds stays: it is found
// and trained; and once there is room again the table goes on growing.
//
// Each case runs in a child process, because limits of a process cannot be taken back from it for certain.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "batches.h"
#include "check.h"
#include "common/scratch_file.h"
#include "folder.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cpu/rows/pages.h"
#include "initial_rows/initial_rows.h"

namespace fusedrec {
namespace {

constexpr int kDim = 1024;
constexpr int64_t kStep = 20;  // rows: 80 kB, so little that a sanitizer's own allocator has it without asking the system
constexpr int64_t kMegabyte = int64_t{1} << 20;
constexpr int kSkipped = 77;

TableSpec Spec() {
  TableSpec spec;
  spec.dim = kDim;
  spec.distribution = Distribution::kUniform;
  spec.b = 1.0;
  spec.seeds = {5};
  return spec;
}

Packed Step(int64_t step) {
  Ids ids;
  for (int64_t id = step * kStep; id < (step + 1) * kStep; ++id) ids.push_back(id);
  return Packed(Batch{{ids}});
}

// Inserts until a step fails; then checks that all is there. Returns the steps that succeeded.
int64_t FillUp(HashTable* table, const std::string& words) {
  int64_t step = 0;
  absl::Status status;
  uint32_t clock = 0;
  for (; status.ok(); ++step) {
    CHECK(step < 5000, "there is no end");
    clock = table->clock();
    status = LookUp(table, Step(step)).status;
  }
  --step;
  CHECK_EQ(table->clock(), clock, "a lookup that fails is none");
  CHECK(absl::IsResourceExhausted(status), "", status.ToString());
  CHECK(absl::StrContains(status.message(), words), "", status.ToString());
  CHECK(step >= 100, "only ", step, " steps had room");
  CHECK_EQ(table->size(0), step * kStep);
  std::vector<float> initial(kDim);
  for (int64_t old = 0; old < step; ++old) {
    const std::vector<float> rows = FindRows(*table, Step(old));
    InitialRow(Spec().distribution, Spec().a, Spec().b, 5, old * kStep, absl::MakeSpan(initial));
    CHECK(std::equal(initial.begin(), initial.end(), rows.begin()));
  }
  return step;
}

// Rows in memory are looked up and trained as before.
void TrainsOn(HashTable* table, int64_t step) {
  const Answer trained = MustLookUp(table, Step(step));
  CHECK_EQ(trained.handles.size(), static_cast<size_t>(kStep));
  const std::vector<float> grads(kStep * kDim, 1.0f);
  CHECK_OK(Apply(table, trained, grads, {1.0f, 1}));
  const std::vector<float> rows = FindRows(*table, Step(step));
  for (size_t i = 0; i < rows.size(); ++i) CHECK_EQ(rows[i], trained.rows[i] - 1.0f);
}

void GrowsOn(HashTable* table, int64_t step) {
  for (int64_t more = step; more < step + 150; ++more) MustLookUp(table, Step(more));
  CHECK_EQ(table->size(0), (step + 150) * kStep);
}

// Address space that the process has now; sanitizers take terabytes of it, so a limit can only be set above.
int64_t AddressSpace() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0;
  file >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

void SetLimit(int resource, int64_t bytes) {
  rlimit limit;
  CHECK_EQ(getrlimit(static_cast<__rlimit_resource>(resource), &limit), 0);
  limit.rlim_cur = bytes < 0 ? limit.rlim_max : static_cast<rlim_t>(bytes);
  CHECK_EQ(setrlimit(static_cast<__rlimit_resource>(resource), &limit), 0);
}

int AddressSpaceEnds() {
  const std::unique_ptr<HashTable> table = MakeTable(Spec());
  MustLookUp(table.get(), Step(0));
  SetLimit(RLIMIT_AS, AddressSpace() + 40 * kMegabyte);
  const int64_t step = FillUp(table.get(), "gave the embedding table no more memory");
  for (int64_t old = 0; old < step; ++old) TrainsOn(table.get(), old);
  SetLimit(RLIMIT_AS, -1);
  GrowsOn(table.get(), step);
  return 0;
}

// Rows that should return to 16 bits stay, with their values, and return once there is memory.
int AddressSpaceEndsAtADemotion() {
  TableSpec spec = Spec();
  spec.hot_after = 2;
  spec.limits.resize(1);
  spec.limits[0].frequency_decay_steps = 1;  // every row has its turn in every lookup
  const std::unique_ptr<HashTable> table = MakeTable(spec);
  Ids ids;
  for (int64_t id = 0; id < kStep; ++id) ids.push_back(id);
  const int64_t bytes = table->record_bytes();
  std::vector<char> records(kStep * bytes);  // counters of 0: float32, never looked up
  for (int64_t id = 0; id < kStep; ++id) {
    const std::vector<float> row(kDim, 0.25f * id);  // the same in 16 bits
    std::memcpy(&records[(id + 1) * bytes - 4 * kDim], row.data(), 4 * kDim);
  }
  CHECK_OK(table->Import({SerialFor}, 0, ids, records.data()));
  const std::vector<float> wanted = FindRows(*table, Step(0));
  CHECK_EQ(wanted[kDim], 0.25f);
  const Packed one(Batch{{Ids{0}}});
  SetLimit(RLIMIT_AS, AddressSpace() + 4 * kMegabyte);
  const absl::Status status = LookUp(table.get(), one).status;
  CHECK(absl::IsResourceExhausted(status), "", status.ToString());
  CHECK(absl::StrContains(status.message(), "gave the embedding table no more memory"), "", status.ToString());
  CHECK_EQ(table->rows_in_pool(0), kStep);
  CHECK(FindRows(*table, Step(0)) == wanted);
  CHECK_EQ(table->clock(), 0u, "the lookup has left no trace");
  CHECK_EQ(RecordsById(*table, 0).at(0).last, 0u);
  CHECK_EQ(RecordsById(*table, 0).at(0).count, 0u);
  CHECK_EQ(table->StatisticsOf(0).hits, 0);
  SetLimit(RLIMIT_AS, -1);
  MustLookUp(table.get(), one);
  CHECK_EQ(table->rows_in_pool(0), int64_t{1}, "all but the row of this lookup have returned");
  CHECK(FindRows(*table, Step(0)) == wanted);
  return 0;
}

// Records that go to the other pool, which has no memory: the rows stay in theirs.
int AddressSpaceEndsAtAnImport() {
  TableSpec spec = Spec();
  spec.hot_after = 2;
  const std::unique_ptr<HashTable> table = MakeTable(spec);
  MustLookUp(table.get(), Step(0));
  const std::vector<float> wanted = FindRows(*table, Step(0));
  std::vector<char> records(kStep * table->record_bytes());  // counters of 0: float32
  Ids ids;
  for (int64_t id = 0; id < kStep; ++id) ids.push_back(id);
  SetLimit(RLIMIT_AS, AddressSpace() + 4 * kMegabyte);
  const absl::Status status = table->Import({SerialFor}, 0, ids, records.data());
  CHECK(absl::IsResourceExhausted(status), "", status.ToString());
  CHECK_EQ(table->size(0), kStep);
  CHECK(FindRows(*table, Step(0)) == wanted);
  SetLimit(RLIMIT_AS, -1);
  CHECK_OK(table->Import({SerialFor}, 0, ids, records.data()));
  CHECK_EQ(table->rows_in_pool(0), kStep);
  CHECK_EQ(table->rows_in_pool(1), int64_t{0});
  return 0;
}

// 8 MB of rows in memory, the rest in a file.
std::unique_ptr<HashTable> Tiered(const std::string& folder) {
  TableSpec spec = Spec();
  spec.memory_budget = 8 * kMegabyte;
  spec.tier_folder = folder;
  return MakeTable(spec);
}

int FileSizeEnds() {
  const Folder folder;
  signal(SIGXFSZ, SIG_IGN);  // the system call fails instead
  SetLimit(RLIMIT_FSIZE, 40 * kMegabyte);
  const std::unique_ptr<HashTable> table = Tiered(folder.name());
  const int64_t step = FillUp(table.get(), "the file of rows beyond memory_budget_per_rank cannot grow");
  TrainsOn(table.get(), step - 1);
  SetLimit(RLIMIT_FSIZE, -1);
  GrowsOn(table.get(), step);
  return 0;
}

// A file system of 40 MB in memory, of this process alone. Only root can make one, and not in every container.
int DiskEnds() {
  const Folder folder;
  if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("none", folder.name().c_str(), "tmpfs", 0, "size=40m") != 0) {
    return kSkipped;
  }
  {
    const std::unique_ptr<HashTable> table = Tiered(folder.name());
    const int64_t step = FillUp(table.get(), "the file of rows beyond memory_budget_per_rank cannot grow");
    TrainsOn(table.get(), step - 1);
  }
  CHECK_EQ(umount(folder.name().c_str()), 0);
  return 0;
}

int MoreThanTheMachineHas() {
  const auto pages = Pages::OfMemory(size_t{1} << 46);
  CHECK(absl::IsResourceExhausted(pages.status()));
  CHECK(absl::StrContains(pages.status().message(), "70368744177664 more bytes of memory"), "",
        pages.status().ToString());
  const auto file = OpenScratchFile("/nowhere/at/all", "rows");
  CHECK(absl::IsInvalidArgument(file.status()));
  CHECK(absl::StrContains(file.status().message(), "tier_folder '/nowhere/at/all' must be a folder"), "",
        file.status().ToString());
  return 0;
}

void InAChild(const char* name, int (*body)()) {
  std::fprintf(stderr, "  %s\n", name);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) _exit(body());
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status), "", name, " was ended by signal ", WTERMSIG(status));
  if (WEXITSTATUS(status) == kSkipped) std::fprintf(stderr, "    skipped: no file system can be mounted here\n");
  CHECK(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kSkipped, "", name, ": ", WEXITSTATUS(status));
}

}  // namespace
}  // namespace fusedrec

TEST(exhaustion) {
  using namespace fusedrec;
  InAChild("address space ends", AddressSpaceEnds);
  InAChild("address space ends at a demotion", AddressSpaceEndsAtADemotion);
  InAChild("address space ends at an import", AddressSpaceEndsAtAnImport);
  InAChild("the file's size ends", FileSizeEnds);
  InAChild("the disk ends", DiskEnds);
  InAChild("more than the machine has", MoreThanTheMachineHas);
}
