// Kernels of a mixed table: rows begin in 16 bits, and have float32 while they are hot (MTGRBoost, section 5.2).
//
// A row keeps its number. The chunk of its meta holds its place, which a move changes: the numbers go through float32 into
// a place of the other pool, and the old place is free. A lookup promotes the rows that it makes hot before it touches
// them. It demotes the rows that have cooled among the shards that have their turn, as on the CPU (eviction.h). An import
// puts each row into the pool that its record names. All of these are counted before anything changes, because they
// decide on memory.
//
// A pass for demotions reads the place of every row, 4 bytes, and the metas of hot rows. There are at most 64 such passes
// in frequency_decay_steps lookups.
#include "hash_table/cuda/message.cuh"
#include "hash_table/cuda/rows.cuh"

namespace fusedrec::device_table {

// The pools to which the rows of a message belong.
struct PoolChoice {
  const uint32_t *where, *first;  // of NumberKernel
  const char* records;            // of an import; null: of a lookup
  int64_t num_ids, hot_after;
  Pins pins;

  // Returns whether position n is the first one of an id that has a row, or gets one.
  __device__ bool Names(int64_t n) const { return n < num_ids && first[n] == n && where[n] != kNowhere; }
  __device__ bool IsNew(int64_t n) const { return (where[n] & kNew) != 0; }
  __device__ bool WantsHot(const TableView& table, int64_t n) const {
    if (records != nullptr) {
      const char* const record = records + n * RecordLayout(table.layout).bytes();
      return WordOf(reinterpret_cast<const uint16_t*>(record), kRecordPool) != 1;
    }
    if (IsNew(n)) return false;
    if (table.IsHot(where[n])) return true;
    const RowMeta& meta = *table.Meta(where[n]);
    const int64_t count = table.limits[meta.segment].CountAt(meta.count, meta.last, pins.clock);
    return count + 1 >= hot_after && !pins.Hold(meta);
  }
};

// Choosers answer a row to count or to move, kNowhere for none: known rows at positions of a message ...
struct Misplaced {
  PoolChoice choice;
  bool to_hot;

  __device__ uint32_t operator()(const TableView& table, int64_t n) const {
    if (!choice.Names(n) || choice.IsNew(n)) return kNowhere;
    const uint32_t row = choice.where[n];
    return choice.WantsHot(table, n) == to_hot && table.IsHot(row) != to_hot ? row : kNowhere;
  }
};
// ... new rows of the hot pool, by their ranks ...
struct FreshHot {
  PoolChoice choice;

  __device__ uint32_t operator()(const TableView& table, int64_t n) const {
    return choice.Names(n) && choice.IsNew(n) && choice.WantsHot(table, n) ? choice.where[n] : kNowhere;
  }
};
// ... and rows that have cooled.
struct Cooled {
  int64_t num_rows, hot_after;
  Pins pins;

  __device__ uint32_t operator()(const TableView& table, int64_t n) const {
    const uint32_t row = static_cast<uint32_t>(n);
    if (n >= num_rows || !table.IsHot(row)) return kNowhere;
    const RowMeta& meta = *table.Meta(row);
    if (meta.segment == kNobody) return kNowhere;
    const Limits& limits = table.limits[meta.segment];
    const bool cools = limits.DemotedAt(pins.clock).Hold(ShardOf(TableHash(meta.id))) &&
                       limits.CountAt(meta.count, meta.last, pins.clock) < hot_after && !pins.Hold(meta);
    return cools ? row : kNowhere;
  }
};

template <typename Chooser>
FUSEDREC_KERNEL CountMovesKernel(TableView table, Chooser chooser, const Counts* counts, unsigned long long* count) {
  if (counts->bad != 0) return;
  const unsigned votes = __ballot_sync(kFullWarp, chooser(table, GlobalThread()) != kNowhere);
  if (Lane() == 0 && votes != 0) atomicAdd(count, static_cast<unsigned long long>(__popc(votes)));
}

struct Move {
  bool to_hot;
  int64_t given_back;          // height of the stack that gets their places
  FreshRows taken;             // places of the other pool
  unsigned long long* ranks;   // threads take them as they come: the order of places shows in no result
  uint32_t version;
};

// All lanes of a warp move one row. The rounding of a demotion changes it, which a delta checkpoint must know.
__device__ inline void MoveRow(const TableView& table, const Move& move, uint32_t row) {
  unsigned long long rank = Lane() == 0 ? atomicAdd(move.ranks, 1ull) : 0;
  rank = __shfl_sync(kFullWarp, rank, 0);
  const uint32_t old = *table.Place(row);
  const uint32_t place = move.to_hot ? move.taken.Of(table.hot, rank) : move.taken.Of(table.cold, rank) | kColdBit;
  RowMeta* const meta = table.Meta(row);
  const uint32_t updated = meta->updated;
  const StoredRow from = table.AtPlace(old), to = table.AtPlace(place);
  for (int j = Lane(); j < table.layout.numbers(); j += 32) to.Store(from.Load(j), j, updated);
  __syncwarp();
  if (Lane() != 0) return;
  *table.Place(row) = place;
  *(move.to_hot ? table.cold : table.hot).Free(static_cast<uint32_t>(move.given_back + rank)) = old & ~kColdBit;
  if (!move.to_hot) meta->updated = move.version;
}

// A thread looks for a row, a warp moves those that its threads found.
template <typename Chooser>
FUSEDREC_KERNEL MoveKernel(TableView table, Chooser chooser, Move move) {
  const uint32_t mine = chooser(table, GlobalThread());
  for (unsigned votes = __ballot_sync(kFullWarp, mine != kNowhere); votes != 0; votes &= votes - 1) {
    MoveRow(table, move, __shfl_sync(kFullWarp, mine, __ffs(static_cast<int>(votes)) - 1));
  }
}

// Gives new rows their places. ranks [2], hot and cold.
FUSEDREC_KERNEL PlaceFreshKernel(TableView table, PoolChoice choice, FreshRows rows, FreshRows hot, FreshRows cold,
                                 unsigned long long* ranks) {
  const int64_t n = GlobalThread();
  if (!choice.Names(n) || !choice.IsNew(n)) return;
  const bool is_hot = choice.WantsHot(table, n);
  const int64_t rank = static_cast<int64_t>(atomicAdd(&ranks[is_hot ? 0 : 1], 1ull));
  *table.Place(rows.Of(table, choice.where[n] & ~kNew)) =
      is_hot ? hot.Of(table.hot, rank) : cold.Of(table.cold, rank) | kColdBit;
}

}  // namespace fusedrec::device_table

#ifndef __CUDACC_RTC__
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
#endif
