// The functions of NCCL and of CUDA's driver that nccl_op.cc calls, for ranks of one host and host memory.
//
// A stream does its work in order and later, in a thread for each group. Messages are files, numbered for each pair of
// ranks. So ranks that launch in different orders get wrong bytes, or wait for ever. FUSEDREC_TEST_NCCL_FAILS makes the
// group of a rank fail: "launch <rank> <group>" at its end, "later <rank> <group>" while it runs.
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using Work = std::function<void()>;

using Event = std::shared_future<void>;  // of the work in front of it
struct Stream {
  Event last;
};

void Wait(const Event& event) {
  if (event.valid()) event.wait();
}

struct Communicator {
  std::string folder;
  int rank, size, groups = 0;
  std::atomic<bool> is_aborted{false};
  std::atomic<int> error{0};
  std::map<int, int> sent, received;  // messages, by the other rank
  Stream* stream = nullptr;  // of the group, and of all groups

  std::string ToSend(int to) { return Path(rank, to, sent[to]++); }
  std::string ToReceive(int from) { return Path(from, rank, received[from]++); }
  std::string Path(int from, int to, int number) const {
    return folder + '-' + std::to_string(from) + '-' + std::to_string(to) + '-' + std::to_string(number);
  }
};

void Require(bool condition, const char* text) {
  if (condition) return;
  std::fprintf(stderr, "nccl_emulation: %s\n", text);
  std::abort();
}

void Write(const std::string& path, const void* data, size_t bytes) {
  std::ofstream(path + ".new", std::ios::binary).write(static_cast<const char*>(data), bytes);
  Require(std::rename((path + ".new").c_str(), path.c_str()) == 0, "a message cannot be written");
}

void Read(const Communicator& comm, const std::string& path, void* data, size_t bytes) {
  while (!comm.is_aborted && access(path.c_str(), F_OK) != 0) usleep(200);
  if (comm.is_aborted) return;
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  Require(static_cast<size_t>(file.tellg()) == bytes, "a message has another length than its receiver expects");
  file.seekg(0).read(static_cast<char*>(data), bytes);
  std::remove(path.c_str());
}

template <typename T>
void Add(const void* values, void* sums, size_t count) {
  for (size_t i = 0; i < count; ++i) static_cast<T*>(sums)[i] += static_cast<const T*>(values)[i];
}

std::deque<Work> group;  // sends in front of receives; one thread launches at a time
Communicator* of_group = nullptr;

Communicator* InGroup(void* comm, void* stream) {
  of_group = static_cast<Communicator*>(comm);
  Require(!of_group->is_aborted, "a call uses a communicator after its abort");
  of_group->stream = static_cast<Stream*>(stream);
  return of_group;
}

}  // namespace

extern "C" {

struct UniqueId {
  char bytes[128];
};

int ncclGetUniqueId(UniqueId* id) {
  std::snprintf(id->bytes, 128, "%s/%u", std::getenv("FUSEDREC_TEST_NCCL_FOLDER"), std::random_device()());
  return 0;
}

int ncclCommInitRank(void** out, int size, UniqueId id, int rank) {
  auto* comm = new Communicator;
  comm->folder = id.bytes;
  comm->rank = rank;
  comm->size = size;
  for (int peer = 0; peer < size; ++peer) Write(comm->ToSend(peer), &size, sizeof(size));
  for (int peer = 0; peer < size; ++peer) Read(*comm, comm->ToReceive(peer), &size, sizeof(size));
  *out = comm;
  return 0;
}

int ncclSend(const void* data, size_t bytes, int, int peer, void* to, void* stream) {
  auto* comm = InGroup(to, stream);
  group.push_front([=, path = comm->ToSend(peer)] { Write(path, data, bytes); });
  return 0;
}

int ncclRecv(void* data, size_t bytes, int, int peer, void* to, void* stream) {
  auto* comm = InGroup(to, stream);
  group.push_back([=, path = comm->ToReceive(peer)] { Read(*comm, path, data, bytes); });
  return 0;
}

int ncclAllReduce(const void* values, void* sums, size_t count, int type, int, void* to, void* stream) {
  auto* comm = InGroup(to, stream);
  const size_t bytes = count * (type == 7 ? 4 : 8);
  const auto add = type == 7 ? &Add<float> : type == 8 ? &Add<double> : &Add<int64_t>;
  std::vector<std::string> paths;
  for (int peer = 0; peer < comm->size; ++peer) {
    ncclSend(values, bytes, 0, peer, comm, stream);
    paths.push_back(comm->ToReceive(peer));
  }
  group.push_back([=] {
    std::vector<char> addend(bytes);
    std::memset(sums, 0, bytes);
    for (const std::string& path : paths) {
      Read(*comm, path, addend.data(), bytes);
      add(addend.data(), sums, count);
    }
  });
  return 0;
}

int ncclGroupStart() { return 0; }

int ncclGroupEnd() {
  Communicator* const comm = std::exchange(of_group, nullptr);
  if (comm == nullptr) return 0;
  char how[8] = "";
  int rank = -1, number = -1;
  if (const char* fails = std::getenv("FUSEDREC_TEST_NCCL_FAILS")) std::sscanf(fails, "%7s %d %d", how, &rank, &number);
  const bool is_failing = rank == comm->rank && number == comm->groups++;
  if (is_failing && how == std::string("launch")) return 2;
  const auto run = [=, before = comm->stream->last, parts = std::exchange(group, {})] {
    Wait(before);
    usleep(std::random_device()() % 1000);
    if (is_failing) comm->error = 6;
    while (is_failing && !comm->is_aborted) usleep(1000);
    for (const Work& part : parts) part();
  };
  comm->stream->last = std::async(std::launch::async, run);
  return 0;
}

int ncclCommAbort(void* aborted) {
  auto* comm = static_cast<Communicator*>(aborted);
  comm->is_aborted = true;
  if (comm->stream != nullptr) Wait(comm->stream->last);
  return 0;
}

int ncclCommGetAsyncError(void* comm, int* error) {
  *error = static_cast<Communicator*>(comm)->error;
  return 0;
}

int cuCtxSetCurrent(void*) { return 0; }
int cuStreamGetCtx(void*, void**) { return 0; }
int cuStreamWaitEvent(void*, void*, unsigned) { return 0; }  // the inputs of an op are there

int cuStreamCreate(void** stream, unsigned) {
  *stream = new Stream;
  return 0;
}

int cuEventCreate(void** event, unsigned) {
  *event = new Event;
  return 0;
}

int cuEventRecord(void* event, void* stream) {
  if (stream != nullptr) *static_cast<Event*>(event) = static_cast<Stream*>(stream)->last;
  return 0;
}

int cuEventSynchronize(void* event) {
  Wait(*static_cast<Event*>(event));
  return 0;
}

int cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  return 0;
}
}
