// Tells which rows may be in use, so that they neither leave nor move, and which handles are no longer valid.
//
// The header of a row has the clock of its last lookup (`last`). A row is pinned if this clock belongs to a lookup that
// runs, to one of the last `window` lookups, or to a lookup since the first one whose gradients wait.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "hash_table/cpu/rows/row_format.h"
#include "hash_table/cpu/rows/running_lookups.h"

namespace fusedrec {

// The pins of one moment.
struct Pins {
  uint32_t now, waiting_since;
  int64_t window;
  std::vector<uint32_t> running;

  bool Hold(const RowHeader& header) const {
    return header.last + window > now || (waiting_since != 0 && header.last >= waiting_since) ||
           std::find(running.begin(), running.end(), header.last) != running.end();
  }
};

class PinnedRows {
 public:
  explicit PinnedRows(int64_t window) : window_(window) {}

  RunningLookups& lookups() { return lookups_; }
  const RunningLookups& lookups() const { return lookups_; }
  uint32_t clock() const { return lookups_.clock(); }
  Pins Current() const {
    RunningLookups::Now now = lookups_.now();
    return {now.clock, waiting_since(), window_, std::move(now.running)};
  }

  // Notes that rows leave or move which no pin of this clock holds.
  void NoteMove(int64_t clock) {
    int64_t seen = moved_at_.load();
    while (seen < clock && !moved_at_.compare_exchange_weak(seen, clock)) {
    }
  }
  // Notes that any row may leave or move.
  void NoteMoveOfAny() { NoteMove(clock() + window_); }
  // Returns whether rows of the lookup of this clock may have left or moved since. Its handles are then invalid.
  bool IsStale(uint32_t clock) const { return clock + window_ <= moved_at_.load(std::memory_order_acquire); }

  // Clock of the first lookup whose gradients wait; 0: none do.
  uint32_t waiting_since() const { return waiting_since_.load(std::memory_order_acquire); }
  // Notes that gradients of the lookup of this clock wait for their update; 0: of no row. One call of these two at a time.
  void BeginWait(uint32_t clock) {
    const uint32_t since = waiting_since();
    if (clock != 0 && (since == 0 || clock < since)) waiting_since_.store(clock, std::memory_order_release);
  }
  void EndWait() { waiting_since_.store(0, std::memory_order_release); }

  // Sets the clock. Handles from before count lookups of another clock, so they become invalid.
  void SetClock(uint32_t clock) {
    lookups_.SetClock(clock);
    moved_at_.store(int64_t{clock} + window_);
  }

 private:
  const int64_t window_;
  RunningLookups lookups_;
  std::atomic<int64_t> moved_at_{-1};  // clock of the last lookup that made rows leave or move
  std::atomic<uint32_t> waiting_since_{0};
};

}  // namespace fusedrec
