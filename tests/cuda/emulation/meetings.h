// Shared memory, and where the threads of a block and the lanes of a warp meet; on the fibers of scheduler.h.
#pragma once

#include "emulation/scheduler.h"

namespace emulation {

inline void* Shared(const void* key, size_t bytes) {
  auto& memory = now->shared[key];
  if (!memory) {
    memory.reset(new char[bytes]);
    std::memset(memory.get(), kPoison, bytes);
  }
  return memory.get();
}

// `place`: of the barrier in the source; all threads of a block must be at the same one.
inline void Barrier(const char* place) {
  if (now->waiting > 0 && std::strcmp(now->barrier_place, place) != 0) Die("threads wait at different barriers");
  now->barrier_place = place;
  if (++now->waiting == now->alive) {
    now->waiting = 0;
    ++now->barrier;
    ++now->progress;
    return;
  }
  for (const uint64_t seen = now->barrier; now->barrier == seen;) Yield();
}

inline int LaneOfThread() { return now->current->linear & 31; }

// Every lane of `mask` brings its operands; the last to come computes for all.
template <typename Compute>
void Collective(unsigned mask, const char* operation, void* mine, const Compute& compute) {
  const int lane = LaneOfThread();
  if ((mask >> lane & 1) == 0) Die("a lane is not in the mask that it passed");
  Meeting& meeting = now->meetings[(now->current->linear & ~31) + __builtin_ctz(mask)];
  if (meeting.arrived != 0 && (meeting.mask != mask || meeting.operation != operation)) {
    Die("lanes of one mask are in different collectives");
  }
  meeting.mask = mask;
  meeting.operation = operation;
  meeting.operands[lane] = mine;
  meeting.arrived |= 1u << lane;
  if (meeting.arrived == mask) {
    compute(meeting.operands);
    meeting.arrived = 0;
    ++meeting.generation;
    ++now->progress;
    return;
  }
  for (const uint64_t seen = meeting.generation; meeting.generation == seen;) Yield();
}

template <typename Visit>
void ForLanes(unsigned mask, const Visit& visit) {
  for (; mask != 0; mask &= mask - 1) visit(__builtin_ctz(mask));
}

}  // namespace emulation
