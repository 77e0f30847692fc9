// CUDA threads as fibers: one block of threads per worker, switched by hand, in an order that a seed chooses.
//
// A barrier and a collective of a warp are meetings: whoever comes first gives way until the last has come. When all
// threads of a block wait and none can go on, the program is stuck for good; it ends with the place of one of them.
// Exits, not exceptions: the kernels under test run inside a Python process.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define EMULATION_UNPOISON(begin, bytes) __asan_unpoison_memory_region(begin, bytes)
#else
#define EMULATION_UNPOISON(begin, bytes)
#endif

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

namespace emulation {

struct Options {
  int workers = 1;      // threads of the machine; blocks are handed out in ascending order
  double preempt = 0;   // probability that a thread gives way at an atomic operation
  uint64_t seed = 0;    // 0: threads take turns in order
};
inline Options options;

constexpr size_t kStackBytes = 256 << 10;
constexpr int kPoison = 0xCD;  // of shared memory at the start of a block

struct Thread {
  void* stack_pointer = nullptr;
  uint3 index{};
  int linear = 0;
  bool done = false;
};

// The meeting point of the lanes of one mask.
struct Meeting {
  uint32_t arrived = 0, mask = 0;
  uint64_t generation = 0;
  const char* operation = nullptr;
  void* operands[32];
};

// Stacks of a worker that has ended are taken over by the next: mapping them costs more than most kernels.
class Stacks {
 public:
  Stacks() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return;
    own_ = std::move(idle_.back());
    idle_.pop_back();
  }
  ~Stacks() {
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(own_));
  }
  int size() const { return static_cast<int>(own_.size()); }
  void Add(char* stack) { own_.push_back(stack); }
  char* operator[](int n) const { return own_[n]; }

 private:
  std::vector<char*> own_;
  inline static std::mutex mutex_;
  inline static std::vector<std::vector<char*>> idle_;
};

struct Block {
  dim3 grid, block;
  uint3 index{};
  std::vector<Thread> threads;
  std::vector<Meeting> meetings;
  Stacks stacks;
  std::map<const void*, std::unique_ptr<char[]>> shared;  // each an allocation of its own: AddressSanitizer sees its ends
  std::unique_ptr<char[]> dynamic_shared;
  int alive = 0, waiting = 0;
  uint64_t barrier = 0, progress = 0, random = 1;
  const char* barrier_place = nullptr;
  Thread* current = nullptr;
  void* scheduler = nullptr;
  const std::function<void()>* body = nullptr;

  int size() const { return static_cast<int>(block.x * block.y * block.z); }
};
inline thread_local Block* now = nullptr;

[[noreturn]] inline void Die(const char* what) {
  std::fprintf(stderr, "emulation: %s (block %u,%u,%u thread %d of %d)\n", what, now->index.x, now->index.y,
               now->index.z, now->current ? now->current->linear : -1, now->size());
  std::fflush(stderr);
  _exit(70);
}

// Saves the stack pointer to *from and goes on at `to`.
#if !defined(__x86_64__)
#error "The emulation switches stacks on x86-64 only."
#endif
__attribute__((naked, noinline, no_sanitize("address", "undefined"))) inline void Switch([[maybe_unused]] void** from,
                                                                                        [[maybe_unused]] void* to) {
  asm(R"(
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
  )");
}

inline void Yield() { Switch(&now->current->stack_pointer, now->scheduler); }

inline uint64_t Random() {
  uint64_t x = now->random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return now->random = x;
}

// A place where a real thread may be overtaken. Progress: one that spins is not stuck.
inline void MayPreempt() {
  ++now->progress;
  if (options.preempt > 0 && static_cast<double>(Random() >> 11) * 0x1p-53 < options.preempt) Yield();
}

inline void ThreadMain() {
  (*now->body)();
  now->current->done = true;
  --now->alive;
  ++now->progress;
  if (now->waiting > 0 && now->waiting == now->alive) {  // threads that have ended hold no barrier up
    now->waiting = 0;
    ++now->barrier;
  }
  Switch(&now->current->stack_pointer, now->scheduler);
  std::abort();
}

inline void Prepare(Block* block, int n) {
  if (block->stacks.size() <= n) {
    void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) Die("no memory for the stacks");
    mprotect(memory, 4096, PROT_NONE);
    EMULATION_UNPOISON(static_cast<char*>(memory) + 4096, kStackBytes - 4096);
    block->stacks.Add(static_cast<char*>(memory));
  }
  // Functions that have returned left nothing poisoned; ThreadMain, at the top, never does.
  EMULATION_UNPOISON(block->stacks[n] + kStackBytes - 1024, 1024);
  Thread& thread = block->threads[n];
  thread.linear = n;
  thread.done = false;
  const unsigned u = static_cast<unsigned>(n);
  thread.index = {u % block->block.x, u / block->block.x % block->block.y, u / (block->block.x * block->block.y)};
  void** top = reinterpret_cast<void**>(block->stacks[n] + kStackBytes);
  *--top = nullptr;  // so that the stack is aligned as at any call
  *--top = reinterpret_cast<void*>(&ThreadMain);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  thread.stack_pointer = top;
}

inline void RunBlock(Block* block, uint3 index, size_t dynamic_bytes) {
  block->index = index;
  const int n = block->size();
  block->alive = n;
  block->waiting = 0;
  block->meetings.resize((n + 31) / 32 * 32);  // nobody waits in those of the block before
  block->shared.clear();
  block->dynamic_shared.reset(dynamic_bytes > 0 ? new char[dynamic_bytes] : nullptr);
  if (dynamic_bytes > 0) std::memset(block->dynamic_shared.get(), kPoison, dynamic_bytes);
  block->threads.resize(n);
  for (int i = 0; i < n; ++i) Prepare(block, i);
  const bool power_of_two = (n & (n - 1)) == 0;
  while (block->alive > 0) {
    const uint64_t before = block->progress;
    const uint64_t start = options.seed != 0 ? Random() % n : 0;
    const uint64_t step = options.seed != 0 && power_of_two ? Random() | 1 : 1;  // an odd step visits every thread
    for (int k = 0; k < n; ++k) {
      Thread& thread = block->threads[(start + k * step) % n];
      if (thread.done) continue;
      block->current = &thread;
      Switch(&block->scheduler, thread.stack_pointer);
    }
    if (block->progress == before && block->alive > 0) Die("deadlock: divergent barrier or collective of a warp");
  }
  block->current = nullptr;
}

inline void Launch(dim3 grid, dim3 block, size_t dynamic_bytes, const std::function<void()>& body) {
  const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
  std::atomic<uint64_t> next{0};
  const auto work = [&](int worker) {
    Block own;
    own.grid = grid;
    own.block = block;
    own.body = &body;
    own.random = (options.seed + 1) * 0x9e3779b97f4a7c15ull + worker * 977 + 1;
    now = &own;
    for (uint64_t i; (i = next.fetch_add(1)) < blocks;) {
      RunBlock(&own, {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                      static_cast<unsigned>(i / grid.x / grid.y)}, dynamic_bytes);
    }
    now = nullptr;
  };
  std::vector<std::thread> others;
  for (int i = 1; i < options.workers; ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& other : others) other.join();
}

}  // namespace emulation
