// Tells which rows may be in use, so that they neither leave nor move, and which handles are no longer valid.
//
// The header of a row has the clock of its last lookup (`last`). A row is pinned if this clock belongs to a lookup that
// runs, to one of the last `window` lookups, or to a lookup since the first one whose gradients wait. The window is
// the number of lookups whose gradients are to come, the last one included. Each lookup sets it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "hash_table/cpu/rows/row_format.h"

namespace fusedrec {

struct ReceivedId {
  int64_t id;
  uint32_t position;  // in the message, headers not counted
  uint32_t segment;
};

// Counts of a row before a lookup, which a failure brings back.
struct RowBefore {
  uint32_t last, count, segment;
};

// Memory of one lookup. The next lookup uses it again, because the system clears all memory that it gives out.
struct LookupScratch {
  std::vector<ReceivedId> items;  // all ids, by shard; as long as the longest batch so far
  std::vector<RowBefore> before;  // of each distinct row, by number, from the first item of its shard on

  void MakeRoomFor(size_t n) {
    if (n <= items.size()) return;
    items.resize(n);
    before.resize(n);
  }
};

// The training lookups of a table: the clock that counts them, which of them run now, and their memory.
class RunningLookups {
 public:
  struct Now {
    uint32_t clock;                 // of the last lookup
    int64_t window;                 // of the last lookup
    std::vector<uint32_t> running;  // clocks of the lookups that run
  };

  // A lookup that runs from its construction to its destruction. It has a clock and a scratch of its own.
  class Lookup {
   public:
    Lookup(RunningLookups* all, int64_t window) : all_(all) {
      std::lock_guard<std::mutex> lock(all_->mutex_);
      all_->window_ = window;
      clock_ = all_->clock_.fetch_add(1) + 1;
      begun_ = ++all_->begun_;
      all_->running_.push_back(clock_);
      std::vector<std::unique_ptr<LookupScratch>>& idle = all_->idle_;
      if (idle.empty()) idle.push_back(std::make_unique<LookupScratch>());
      scratch_ = std::move(idle.back());
      idle.pop_back();
    }
    ~Lookup() {
      std::lock_guard<std::mutex> lock(all_->mutex_);
      std::vector<uint32_t>& running = all_->running_;
      running.erase(std::find(running.begin(), running.end(), clock_));
      all_->idle_.push_back(std::move(scratch_));
    }
    Lookup(const Lookup&) = delete;
    Lookup& operator=(const Lookup&) = delete;
    // After a failure. The clock stays where another lookup has begun since: a row may have this one's clock.
    void GiveClockBack() {
      std::lock_guard<std::mutex> lock(all_->mutex_);
      uint32_t now = clock_;
      if (begun_ == all_->begun_) all_->clock_.compare_exchange_strong(now, clock_ - 1);
    }
    // At the end. sum: of the hashes of the handles.
    void NoteHandles(uint64_t sum) const {
      std::lock_guard<std::mutex> lock(all_->mutex_);
      all_->handles_[clock_ % kRemembered] = {clock_, sum};
    }
    uint32_t clock() const { return clock_; }
    LookupScratch* scratch() const { return scratch_.get(); }

   private:
    RunningLookups* all_;
    uint32_t clock_;
    int64_t begun_;
    std::unique_ptr<LookupScratch> scratch_;
  };

  // The sum of the hashes of the handles of this lookup; 0 where it is forgotten, or has no handle.
  uint64_t HandlesOf(uint32_t clock) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& [of, sum] = handles_[clock % kRemembered];
    return of == clock ? sum : 0;
  }
  uint32_t clock() const { return clock_.load(); }
  Now now() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return {clock_.load(), window_, running_};
  }
  void SetClock(uint32_t clock) { clock_.store(clock); }
  void AdvanceTo(uint32_t clock) {
    for (uint32_t seen = clock_.load(); seen < clock && !clock_.compare_exchange_weak(seen, clock);) {
    }
  }

 private:
  static constexpr int kRemembered = 32;

  std::atomic<uint32_t> clock_{0};
  mutable std::mutex mutex_;  // guards the members below
  std::vector<uint32_t> running_;
  int64_t window_ = 1;
  int64_t begun_ = 0;  // lookups
  std::array<std::pair<uint32_t, uint64_t>, kRemembered> handles_{};  // clock and sum of the latest lookups
  std::vector<std::unique_ptr<LookupScratch>> idle_;  // of lookups that have ended
};

struct Pins {
  uint32_t now, waiting_since;
  int64_t window;
  std::vector<uint32_t> running;

  bool Hold(const RowHeader& header) const {
    return IsPinned(header.last, now, window, waiting_since) ||
           std::find(running.begin(), running.end(), header.last) != running.end();
  }
};

class PinnedRows {
 public:
  RunningLookups& lookups() { return lookups_; }
  const RunningLookups& lookups() const { return lookups_; }
  uint32_t clock() const { return lookups_.clock(); }
  Pins Current() const {
    RunningLookups::Now now = lookups_.now();
    return {now.clock, waiting_since(), now.window, std::move(now.running)};
  }

  // Notes that rows leave or move which these pins do not hold.
  void NoteMove(const Pins& pins) { NoteMoveUntil(pins.now - pins.window); }
  void NoteMoveOfAny() { NoteMoveUntil(clock()); }
  // Returns whether rows of this lookup may have left or moved since. Its handles are then invalid.
  bool IsStale(uint32_t clock) const { return clock <= stale_until_.load(std::memory_order_acquire); }

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
    stale_until_.store(clock);
  }

 private:
  void NoteMoveUntil(int64_t clock) {
    int64_t seen = stale_until_.load();
    while (seen < clock && !stale_until_.compare_exchange_weak(seen, clock)) {
    }
  }

  RunningLookups lookups_;
  std::atomic<int64_t> stale_until_{-1};  // clock of the latest lookup with rows that may have left or moved
  std::atomic<uint32_t> waiting_since_{0};
};

}  // namespace fusedrec
