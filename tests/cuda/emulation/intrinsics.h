// The functions of a warp, atomic operations and arithmetic of CUDA, on the fibers of scheduler.h.
#pragma once

#include <cmath>
#include <type_traits>

#include "emulation/meetings.h"

#define EMULATION_TEXT(x) #x
#define EMULATION_LINE(x) EMULATION_TEXT(x)
#define __syncthreads() emulation::Barrier(__FILE__ ":" EMULATION_LINE(__LINE__))
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulation::Collective(mask, "syncwarp", nullptr, [](void**) {});
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  unsigned votes = predicate != 0;
  emulation::Collective(mask, "ballot", &votes, [mask](void** lanes) {
    unsigned all = 0;
    emulation::ForLanes(mask, [&](int lane) { all |= *static_cast<unsigned*>(lanes[lane]) << lane; });
    emulation::ForLanes(mask, [&](int lane) { *static_cast<unsigned*>(lanes[lane]) = all; });
  });
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

namespace emulation {

// A lane that reads from one outside the mask gets nothing that it could use.
template <typename T>
T Shuffle(unsigned mask, T value, int source) {
  struct Operand {
    T in, out;
    int source;
  } operand{value, value, source};
  Collective(mask, "shfl", &operand, [mask](void** lanes) {
    ForLanes(mask, [&](int lane) {
      auto* to = static_cast<Operand*>(lanes[lane]);
      if ((mask >> to->source & 1) == 0) Die("a shuffle reads a lane outside its mask");
      to->out = static_cast<Operand*>(lanes[to->source])->in;
    });
  });
  return operand.out;
}

}  // namespace emulation

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = emulation::LaneOfThread();
  return emulation::Shuffle(mask, value, (lane & ~(width - 1)) + (source & (width - 1)));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emulation::LaneOfThread(), d = static_cast<int>(delta);
  return emulation::Shuffle(mask, value, (lane & (width - 1)) >= d ? lane - d : lane);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emulation::LaneOfThread(), d = static_cast<int>(delta);
  return emulation::Shuffle(mask, value, (lane & (width - 1)) + d < width ? lane + d : lane);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = emulation::LaneOfThread(), source = lane ^ bits;
  return emulation::Shuffle(mask, value, (source & ~(width - 1)) == (lane & ~(width - 1)) ? source : lane);
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  struct Operand {
    T in;
    unsigned out;
  } operand{value, 0};
  emulation::Collective(mask, "match_any", &operand, [mask](void** lanes) {
    emulation::ForLanes(mask, [&](int a) {
      emulation::ForLanes(mask, [&](int b) {
        auto *x = static_cast<Operand*>(lanes[a]), *y = static_cast<Operand*>(lanes[b]);
        if (x->in == y->in) x->out |= 1u << b;
      });
    });
  });
  return operand.out;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}
inline float __int_as_float(int x) { float f; std::memcpy(&f, &x, 4); return f; }
inline int __float_as_int(float x) { int i; std::memcpy(&i, &x, 4); return i; }

namespace emulation {

template <typename T, typename Change>
T ReadChangeWrite(T* p, const Change& change) {
  MayPreempt();
  T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n(p, &old, change(old), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}

}  // namespace emulation

template <typename T, typename U>
T atomicCAS(T* p, U expected, U wanted) {
  emulation::MayPreempt();
  T seen = static_cast<T>(expected);
  __atomic_compare_exchange_n(p, &seen, static_cast<T>(wanted), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return seen;
}
template <typename T, typename U>
T atomicExch(T* p, U value) {
  emulation::MayPreempt();
  return __atomic_exchange_n(p, static_cast<T>(value), __ATOMIC_SEQ_CST);
}
template <typename T, typename U>
T atomicAdd(T* p, U value) {
  if constexpr (std::is_integral_v<T>) {
    emulation::MayPreempt();
    return __atomic_fetch_add(p, static_cast<T>(value), __ATOMIC_SEQ_CST);
  } else {
    static_assert(sizeof(T) == 4);
    const auto add = [value](int old) { return __float_as_int(__int_as_float(old) + value); };
    return __int_as_float(emulation::ReadChangeWrite(reinterpret_cast<int*>(p), add));
  }
}
template <typename T, typename U>
T atomicMin(T* p, U value) {
  return emulation::ReadChangeWrite(p, [value](T old) { return old < static_cast<T>(value) ? old : static_cast<T>(value); });
}
template <typename T, typename U>
T atomicMax(T* p, U value) {
  return emulation::ReadChangeWrite(p, [value](T old) { return old > static_cast<T>(value) ? old : static_cast<T>(value); });
}
template <typename T, typename U>
T atomicOr(T* p, U value) {
  emulation::MayPreempt();
  return __atomic_fetch_or(p, static_cast<T>(value), __ATOMIC_SEQ_CST);
}
template <typename T, typename U>
T atomicAnd(T* p, U value) {
  emulation::MayPreempt();
  return __atomic_fetch_and(p, static_cast<T>(value), __ATOMIC_SEQ_CST);
}

namespace fusedrec {

template <typename T>
inline T LoadFresh(const T* p) {
  emulation::MayPreempt();
  return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
template <typename T>
inline void StoreFresh(T* p, T value) {
  emulation::MayPreempt();
  __atomic_store_n(p, value, __ATOMIC_SEQ_CST);
}
inline void Backoff() {
  ++emulation::now->progress;
  if (emulation::options.workers > 1) sched_yield();
  emulation::Yield();
}

}  // namespace fusedrec

namespace emulation {

// Atomic operations, or with a fault on (mutants.py) a read and a write, between which other threads run.
struct TwoSteps {
  bool fault;

  template <typename T, typename Atomic, typename Change>
  T Do(T* p, const Atomic& atomic, const Change& change) const {
    if (!fault) return atomic();
    const T old = fusedrec::LoadFresh(p);
    fusedrec::StoreFresh(p, static_cast<T>(change(old)));
    return old;
  }
#define EMULATION_TWO_STEPS(name, changed)                                                               \
  template <typename T, typename U>                                                                      \
  T name(T* p, U value) const {                                                                          \
    return Do(p, [=] { return atomic##name(p, value); }, [=](T old) { return changed; });                \
  }
  EMULATION_TWO_STEPS(Add, old + static_cast<T>(value))
  EMULATION_TWO_STEPS(Min, old < static_cast<T>(value) ? old : static_cast<T>(value))
  EMULATION_TWO_STEPS(Max, old > static_cast<T>(value) ? old : static_cast<T>(value))
  EMULATION_TWO_STEPS(Or, old | static_cast<T>(value))
  EMULATION_TWO_STEPS(And, old & static_cast<T>(value))
#undef EMULATION_TWO_STEPS
};

}  // namespace emulation
