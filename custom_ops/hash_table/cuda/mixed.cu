// Rows that move between the pools of a mixed table; mixed.cuh says which.
#include "hash_table/cuda/mixed.cuh"

#include <algorithm>

#include "hash_table/cuda/table_memory.h"

namespace {

// At the lookup of these pins, or of an import.
PoolChoice ChoiceOf(const Received& received, const AdmitScratch& at, const TableOptions& options, const Pins& pins) {
  return {at.where, at.first, received.records, received.view.num_ids, options.hot_after, pins};
}

template <typename Chooser>
void LaunchCount(const TableView& table, int64_t candidates, const Chooser& chooser, const Counts* counts,
                 unsigned long long* count, void* stream) {
  const auto kernel = &CountMovesKernel<Chooser>;
  FUSEDREC_FOR_EACH(kernel, candidates, stream, table, chooser, counts, count);
}

template <typename Chooser>
void LaunchMove(const TableView& table, int64_t candidates, const Chooser& chooser, const Move& move, void* stream) {
  const auto kernel = &MoveKernel<Chooser>;
  FUSEDREC_FOR_EACH(kernel, candidates, stream, table, chooser, move);
}

}  // namespace

bool FusedrecDeviceTable::MayDemoteAt(uint32_t clock) const {
  return hot_.size() > 0 && AnyLimits([=](const Limits& limits) {
    const Shards due = limits.DemotedAt(clock);
    return due.begin < due.end;
  });
}

void FusedrecDeviceTable::CountMoves(const Received& received, const AdmitScratch& at, uint32_t clock,
                                     void* stream) const {
  Counts* const counts = received.counts;
  const int64_t num_ids = received.view.num_ids;
  const PoolChoice choice = ChoiceOf(received, at, options_, PinsAt(clock, kNoAttempt));
  LaunchCount(View(), num_ids, Misplaced{choice, true}, counts, &counts->promoted, stream);
  if (received.records != nullptr) {
    LaunchCount(View(), num_ids, Misplaced{choice, false}, counts, &counts->demoted, stream);
    LaunchCount(View(), num_ids, FreshHot{choice}, counts, &counts->fresh_hot, stream);
  } else if (MayDemoteAt(clock)) {
    const Cooled cooled{rows_.next, options_.hot_after, PinsAt(clock, attempt_)};
    LaunchCount(View(), rows_.next, cooled, counts, &counts->demoted, stream);
  }
}

// A row that moves keeps its number, but handles of lookups outside the window end, as in host memory.
int FusedrecDeviceTable::MoveRows(const Received& received, const AdmitScratch& at, const Moves& moves, uint32_t clock,
                                  uint32_t version, void* stream) {
  unsigned long long* const ranks = received.counts->ranks;
  const PoolChoice choice = ChoiceOf(received, at, options_, PinsAt(clock, kNoAttempt));
  if (moves.demoted > 0) {
    const Move down{false, hot_.free, cold_.Fresh(), &ranks[1], version};
    if (received.records != nullptr) {
      LaunchMove(View(), received.view.num_ids, Misplaced{choice, false}, down, stream);
    } else {
      const Cooled cooled{rows_.next, options_.hot_after, PinsAt(clock, attempt_)};
      LaunchMove(View(), rows_.next, cooled, down, stream);
    }
    // Some of the counted rows may have been evicted since.
    unsigned long long moved;
    FUSEDREC_TRY(CopyToHost(&moved, &ranks[1], 1, stream));
    cold_.Take(static_cast<int64_t>(moved));
    hot_.free += static_cast<int64_t>(moved);
    if (moved > 0) stale_until_ = std::max(stale_until_, clock - window_);
  }
  if (moves.promoted > 0) {
    const Move up{true, cold_.free, hot_.Fresh(), &ranks[0], version};
    LaunchMove(View(), received.view.num_ids, Misplaced{choice, true}, up, stream);
    hot_.Take(moves.promoted);
    cold_.free += moves.promoted;
    stale_until_ = std::max(stale_until_, clock - window_);
  }
  return LastError();
}

void FusedrecDeviceTable::PlaceFresh(const Received& received, const AdmitScratch& at, const FreshRows& fresh,
                                     int64_t fresh_rows, int64_t fresh_hot, void* stream) {
  const PoolChoice choice = ChoiceOf(received, at, options_, Pins());
  FUSEDREC_FOR_EACH(PlaceFreshKernel, received.view.num_ids, stream, View(), choice, fresh, hot_.Fresh(), cold_.Fresh(),
                    received.counts->ranks + 2);
  hot_.Take(fresh_hot);
  cold_.Take(fresh_rows - fresh_hot);
}
