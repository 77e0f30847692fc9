// Streams and events. By default every call runs at once, as if it were followed by a wait.
//
// After emulation_defer, work waits in the queue of its stream. It runs when the host waits for it, with the work that
// its events name, and no other. So work that lacks an event runs before the work that it needs, or after its memory has
// gone to others. `wander` is the probability that another stream runs a piece at a call. All orders are legal in CUDA.
//
// A copy from host memory that is not pinned reads it at the call, one from pinned memory when it runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "emulation/scheduler.h"

namespace emulation {

// Whether the work before one record of an event has run.
using Mark = std::shared_ptr<bool>;

struct Work {
  std::function<void()> run;
  Mark waits_for, reaches;  // each may be null
};

struct Stream {
  std::deque<Work> queue;
};

// One for all libraries of a process: the functions that give it out are weak and visible.
struct Streams {
  std::recursive_mutex mutex;
  bool deferred = false;
  double wander = 0;
  uint64_t random = 1;
  Stream default_stream;
  std::vector<Stream*> all{&default_stream};
  std::map<const char*, size_t> pinned;
  Mark held = std::make_shared<bool>(true);  // of emulation_hold
};

}  // namespace emulation

extern "C" __attribute__((visibility("default"), weak)) emulation::Streams* emulation_streams() {
  static emulation::Streams streams;
  return &streams;
}

namespace emulation {

inline Stream* StreamOf(void* stream) {
  return stream == nullptr ? &emulation_streams()->default_stream : static_cast<Stream*>(stream);
}

// Runs the first work of a stream, or the first that it waits for.
inline void RunFirst(Stream* stream) {
  for (;;) {
    const Mark& wanted = stream->queue.front().waits_for;
    if (wanted == nullptr || *wanted) break;
    Stream* other = nullptr;
    for (Stream* one : emulation_streams()->all) {
      for (const Work& work : one->queue) other = work.reaches == wanted ? one : other;
    }
    if (other == nullptr) {
      std::fprintf(stderr, "emulation: a stream waits for an event that no stream reaches\n");
      _exit(70);
    }
    stream = other;
  }
  const Work work = std::move(stream->queue.front());
  stream->queue.pop_front();
  if (work.run) work.run();
  if (work.reaches != nullptr) *work.reaches = true;
}

inline uint64_t RandomOfStreams() {
  uint64_t& x = emulation_streams()->random;
  x ^= x << 13;
  x ^= x >> 7;
  return x ^= x << 17;
}

inline void Wander() {
  Streams& streams = *emulation_streams();
  while (static_cast<double>(RandomOfStreams() >> 11) * 0x1p-53 < streams.wander) {
    Stream* const one = streams.all[RandomOfStreams() % streams.all.size()];
    if (!one->queue.empty()) RunFirst(one);
  }
}

inline void Enqueue(void* stream, Work work) {
  Streams& streams = *emulation_streams();
  std::unique_lock<std::recursive_mutex> lock(streams.mutex);
  if (streams.deferred) {
    StreamOf(stream)->queue.push_back(std::move(work));
    Wander();
    return;
  }
  lock.unlock();
  if (work.run) work.run();
  if (work.reaches != nullptr) *work.reaches = true;
}

inline void Synchronize(void* stream) {
  std::lock_guard<std::recursive_mutex> lock(emulation_streams()->mutex);
  if (emulation_streams()->deferred) Wander();
  while (!StreamOf(stream)->queue.empty()) RunFirst(StreamOf(stream));
}

// A source that the caller may change after the call is read now.
inline std::function<void()> CopyOf(void* to, const void* from, size_t bytes, bool from_host) {
  Streams& streams = *emulation_streams();
  std::lock_guard<std::recursive_mutex> lock(streams.mutex);
  const auto after = streams.pinned.upper_bound(static_cast<const char*>(from));
  const bool is_pinned = after != streams.pinned.begin() &&
                         static_cast<const char*>(from) < std::prev(after)->first + std::prev(after)->second;
  if (!streams.deferred || !from_host || is_pinned) return [=] { std::memcpy(to, from, bytes); };
  const auto* const begin = static_cast<const char*>(from);
  return [to, staged = std::vector<char>(begin, begin + bytes)] { std::memcpy(to, staged.data(), staged.size()); };
}

}  // namespace emulation

struct CUevent_st {
  emulation::Mark last = std::make_shared<bool>(true);  // an event that nobody has recorded is complete
};

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = CUevent_st*;
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  emulation::Enqueue(stream, {emulation::CopyOf(to, from, bytes, kind == cudaMemcpyHostToDevice), nullptr, nullptr});
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream) {
  emulation::Enqueue(stream, {[=] { std::memset(to, byte, bytes); }, nullptr, nullptr});
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  emulation::Synchronize(stream);
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  std::lock_guard<std::recursive_mutex> lock(emulation_streams()->mutex);
  auto* const made = new emulation::Stream;
  emulation_streams()->all.push_back(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  emulation::Synchronize(stream);  // CUDA frees the stream when its work has run
  std::lock_guard<std::recursive_mutex> lock(emulation_streams()->mutex);
  auto& all = emulation_streams()->all;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i] != emulation::StreamOf(stream)) continue;
    all.erase(all.begin() + i);
    break;
  }
  delete emulation::StreamOf(stream);
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->last = std::make_shared<bool>(false);
  emulation::Enqueue(stream, {nullptr, nullptr, event->last});
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  emulation::Enqueue(stream, {nullptr, event->last, nullptr});
  return cudaSuccess;
}
// The error of a call, which stays until somebody asks.
extern "C" __attribute__((visibility("default"), weak)) cudaError_t* emulation_last_error() {
  static cudaError_t error = cudaSuccess;
  return &error;
}

// Memory that ends on demand: pinned memory here, and device memory of an allocator that asks. All libraries of a process
// count together.
extern "C" __attribute__((visibility("default"), weak)) std::atomic<int64_t>* emulation_left() {
  static std::atomic<int64_t> left{-1};  // negative: as many allocations as there is memory for
  return &left;
}
extern "C" __attribute__((visibility("default"), weak)) void emulation_allocations_left(int64_t count) {
  *emulation_left() = count;
}
// Returns whether an allocation has memory.
extern "C" __attribute__((visibility("default"), weak)) bool emulation_allocates() {
  const int64_t left = emulation_left()->load();
  if (left > 0) --*emulation_left();
  return left != 0;
}

inline cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  if (!emulation_allocates()) return *emulation_last_error() = cudaErrorMemoryAllocation;
  std::lock_guard<std::recursive_mutex> lock(emulation_streams()->mutex);
  *memory = std::malloc(bytes);
  emulation_streams()->pinned[static_cast<char*>(*memory)] = bytes;
  return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* memory) {
  std::lock_guard<std::recursive_mutex> lock(emulation_streams()->mutex);
  emulation_streams()->pinned.erase(static_cast<char*>(memory));
  std::free(memory);
  return cudaSuccess;
}

// Turns the queues on, or off after all work has run.
extern "C" __attribute__((visibility("default"), weak)) void emulation_defer(int on, double wander, uint64_t seed) {
  emulation::Streams& streams = *emulation_streams();
  std::lock_guard<std::recursive_mutex> lock(streams.mutex);
  for (emulation::Stream* stream : streams.all) {
    while (!stream->queue.empty()) emulation::RunFirst(stream);
  }
  streams.deferred = on != 0;
  streams.wander = wander;
  streams.random = seed * 0x9e3779b97f4a7c15ull + 1;
}
extern "C" __attribute__((visibility("default"), weak)) void emulation_wait(void* stream) {
  emulation::Synchronize(stream);
}
// Frees memory when the work on `stream` before has run: an allocator gives it to later work of this stream at once.
extern "C" __attribute__((visibility("default"), weak)) void emulation_free(void* memory, void* stream) {
  emulation::Enqueue(stream, {[=] { std::free(memory); }, nullptr, nullptr});
}
// Enqueues work that does nothing on the default stream; emulation_held tells whether it still waits there.
extern "C" __attribute__((visibility("default"), weak)) void emulation_hold() {
  emulation::Mark& held = emulation_streams()->held;
  held = std::make_shared<bool>(false);
  emulation::Enqueue(nullptr, {nullptr, nullptr, held});
}
extern "C" __attribute__((visibility("default"), weak)) int emulation_held() {
  std::lock_guard<std::recursive_mutex> lock(emulation_streams()->mutex);
  return *emulation_streams()->held ? 0 : 1;
}
