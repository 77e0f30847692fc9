// Kernels of a lookup; the idea stands in hash_table_cuda.h.
#pragma once

#include "common/look_back.cuh"
#include "hash_table/cuda/message.cuh"
#include "hash_table/cuda/rows.cuh"

namespace fusedrec::device_table {

constexpr int kNumberIds = 8;  // of a thread of NumberKernel
constexpr int kNumberTile = kThreads * kNumberIds;
constexpr uint32_t kFreeSlot = 0xffffffffu;

// A warp per source: run_begin out of the headers. source_begin [sources + 1]: entries before each source.
FUSEDREC_KERNEL RunsKernel(const int64_t* __restrict__ entries, const int64_t* __restrict__ source_begin,
                           int64_t sources, int64_t segments, int64_t* __restrict__ run_begin, Counts* counts) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + Warp();
  if (r >= sources) return;
  const int64_t begin = source_begin[r], ids = source_begin[r + 1] - begin - segments;
  int64_t before = 0;
  bool bad = false;
  for (int64_t base = 0; base < segments; base += 32) {
    const int64_t s = base + Lane();
    int64_t count = s < segments ? entries[begin + s] : 0;
    bad = bad || count < 0 || count > ids;
    if (bad) count = 0;
    const int64_t until = before + WarpInclusiveSum(count);
    if (s < segments) run_begin[r * segments + s] = begin - r * segments + until - count;
    before = __shfl_sync(kFullWarp, until, 31);
  }
  if (__any_sync(kFullWarp, bad || before != ids) && Lane() == 0) atomicMax(&counts->bad, 1ull);
  if (r == sources - 1 && Lane() == 0) run_begin[sources * segments] = source_begin[sources] - sources * segments;
}

FUSEDREC_KERNEL FingerprintKernel(MessageView message, Counts* counts) {
  if (counts->bad != 0) return;
  int64_t low, high;
  message.Bounds(&low, &high);
  const int64_t n = GlobalThread();
  unsigned long long part = 0;
  if (n < message.num_ids) {
    const int64_t run = message.RunOf(low, high, n);
    part = FingerprintOf(run % message.segments, message.Id(n, run), n);
  }
  part = WarpSum(part);
  if (Lane() == 0) atomicAdd(&counts->fingerprint, part);
}

// The slot in which a new id settles: open addressing, the smallest position of the id stays (as in segment_unique).
__device__ inline uint32_t Settle(const MessageView& message, int64_t id, int64_t segment, uint32_t n, uint64_t hash,
                                  uint32_t num_slots, uint32_t* slots) {
  uint32_t slot = RangeOf(Mix64(hash + static_cast<uint64_t>(segment)), num_slots);
  for (;;) {
    uint32_t seen = LoadFresh(&slots[slot]);
    if (seen == kFreeSlot) {
      seen = atomicCAS(&slots[slot], kFreeSlot, n);
      if (seen == kFreeSlot) return slot;
    }
    const int64_t run = message.RunOf(0, message.runs - 1, seen);
    if (message.Id(seen, run) == id && run % message.segments == segment) {
      if (n < seen) atomicMin(&slots[slot], n);
      return slot;
    }
    if (++slot == num_slots) slot = 0;
  }
}

// where[n]: the row of the id of position n, or kNew and the slot in which it settled. One probe per known id; the same
// word of its row that says when it was touched gathers the first position.
FUSEDREC_KERNEL ProbeKernel(TableView table, MessageView message, uint32_t attempt, const Counts* counts,
                            uint32_t num_slots, uint32_t* slots, uint32_t* __restrict__ where) {
  if (counts->bad != 0) return;
  int64_t low, high;
  message.Bounds(&low, &high);
  const int64_t n = GlobalThread();
  const bool active = n < message.num_ids;
  const int64_t run = active ? message.RunOf(low, high, n) : 0;
  const int64_t id = active ? message.Id(n, run) : 0, segment = run % message.segments;
  const uint64_t hash = TableHash(id);
  const uint32_t row = FindRow(active ? table.segments + segment : nullptr, id, hash);
  if (!active) return;
  const uint32_t position = static_cast<uint32_t>(n);
  if (row != kNowhere) {
    atomicMax(&table.Meta(row)->touch, TouchOf(attempt, position));
    where[n] = row;
  } else {
    where[n] = kNew | Settle(message, id, segment, position, hash, num_slots, slots);
  }
}

// The form for inference: kNowhere for ids without a row, or whose row has expired.
FUSEDREC_KERNEL FindKernel(TableView table, MessageView message, const Counts* counts, HasExpired has_expired,
                           uint32_t* __restrict__ where) {
  if (counts->bad != 0) return;
  const int64_t n = GlobalThread();
  const uint32_t row = FindReceived(table, message, n);
  if (n >= message.num_ids) return;
  where[n] = row != kNowhere && has_expired(row, *table.Meta(row)) ? kNowhere : row;
}

// first[n]: the first position of the same id. number[n]: first positions before n. A first position of a new id: its
// where becomes kNew and its rank among those, or kNowhere where verdict (null: none) refuses it. new_of [segments]
// counts the ids that get a row; hits_of counts the known ids.
FUSEDREC_KERNEL NumberKernel(TableView table, MessageView message, const uint32_t* __restrict__ slots,
    const uint8_t* __restrict__ verdict, uint32_t* __restrict__ where, uint32_t* __restrict__ first,
    uint32_t* __restrict__ number, Counts* counts, unsigned long long* __restrict__ new_of,
    unsigned long long* __restrict__ hits_of, unsigned long long* states, unsigned* next_tile) {
  if (counts->bad != 0) return;
  FUSEDREC_SHARED(unsigned, begin, 2 * kWarps);  // of each warp: firsts, then new ones
  const unsigned tile = TakeTile(next_tile);
  const int64_t base = static_cast<int64_t>(tile) * kNumberTile + Warp() * 32 * kNumberIds + Lane();
  uint32_t own[kNumberIds];
  unsigned firsts[kNumberIds], fresh[kNumberIds], num_firsts = 0, num_fresh = 0;
#pragma unroll
  for (int k = 0; k < kNumberIds; ++k) {
    const int64_t n = base + k * 32;
    own[k] = kFreeSlot;
    const uint32_t at = n < message.num_ids ? where[n] : 0;
    if (n < message.num_ids) {
      own[k] = (at & kNew) != 0 ? slots[at & ~kNew] : PositionOf(table.Meta(at)->touch);
    }
    firsts[k] = __ballot_sync(kFullWarp, own[k] == n);
    const bool is_new = own[k] == n && (at & kNew) != 0;
    fresh[k] = __ballot_sync(kFullWarp, is_new && (verdict == nullptr || verdict[n] == kAdmitted));
    num_firsts += __popc(firsts[k]);
    num_fresh += __popc(fresh[k]);
  }
  if (Lane() < 2) begin[Lane() * kWarps + Warp()] = Lane() == 0 ? num_firsts : num_fresh;
  __syncthreads();
  const int64_t tiles = gridDim.x;
  if (Warp() < 2) {  // a warp for each of the two
    unsigned* const mine = begin + Warp() * kWarps;
    const unsigned sum = Lane() < kWarps ? mine[Lane()] : 0, until = WarpInclusiveSum(sum);
    const unsigned all = __shfl_sync(kFullWarp, until, 31);
    const unsigned before = LookBack(states + Warp() * tiles, tile, all);
    if (Lane() < kWarps) mine[Lane()] = before + until - sum;
    if (tile == tiles - 1 && Lane() == 0) (Warp() == 0 ? counts->distinct : counts->fresh) = before + all;
  }
  __syncthreads();
  unsigned next = begin[Warp()], rank = begin[kWarps + Warp()];
#pragma unroll
  for (int k = 0; k < kNumberIds; ++k) {
    const int64_t n = base + k * 32;
    if (n < message.num_ids) {
      first[n] = own[k];
      number[n] = next + __popc(firsts[k] & LanesBefore());
    }
    int segment = -1;
    if ((fresh[k] >> Lane() & 1) != 0) {
      where[n] = kNew | (rank + __popc(fresh[k] & LanesBefore()));
      segment = static_cast<int>(message.RunOf(0, message.runs - 1, n) % message.segments);
    }
    const bool is_new = segment >= 0, is_first = (firsts[k] >> Lane() & 1) != 0;
    if (is_first && !is_new && (where[n] & kNew) != 0) {
      where[n] = kNowhere;
    } else if (is_first && !is_new) {
      segment = static_cast<int>(table.Meta(where[n])->segment);
    }
    const unsigned alike = __match_any_sync(kFullWarp, segment) & (is_new ? fresh[k] : ~fresh[k]);
    if (segment >= 0 && (alike & LanesBefore()) == 0) {
      atomicAdd(is_new ? &new_of[segment] : &hits_of[segment], static_cast<unsigned long long>(__popc(alike)));
    }
    next += __popc(firsts[k]);
    rank += __popc(fresh[k]);
  }
}

// inverse [ids], handles [distinct]; a first position gives a new id its row, and touches the row in a lookup. Rows that
// come from elsewhere have counters of their own. A refused id has the handle -1.
FUSEDREC_KERNEL CommitKernel(TableView table, MessageView message, FreshRows fresh, uint32_t clock, uint32_t version,
    bool is_lookup, const uint32_t* __restrict__ where, const uint32_t* __restrict__ first,
    const uint32_t* __restrict__ number, int32_t* __restrict__ inverse, int64_t* __restrict__ handles) {
  const int64_t n = GlobalThread();
  if (n >= message.num_ids) return;
  inverse[n] = static_cast<int32_t>(number[first[n]]);
  if (first[n] != n) return;
  uint32_t row = where[n];
  if (row == kNowhere) {
    handles[number[n]] = -1;
    return;
  }
  if ((row & kNew) == 0) {
    RowMeta* const meta = table.Meta(row);
    if (is_lookup) {
      const uint32_t count = table.limits[meta->segment].CountAt(meta->count, meta->last, clock);
      meta->last = clock;
      meta->count = count + (count != 0xffffffffu);
    }
  } else {
    row = fresh.Of(table, row & ~kNew);
    const int64_t run = message.RunOf(0, message.runs - 1, n), segment = run % message.segments;
    const int64_t id = message.Id(n, run);
    *table.Meta(row) = {0, id, static_cast<uint32_t>(segment), is_lookup ? clock : 0, is_lookup, version};
    if (table.layout.noted) *table.Note(row) = 0;
    InsertKey(table.segments[segment].lines, table.segments[segment].mask, id, TableHash(id), row);
  }
  handles[number[n]] = static_cast<int64_t>(clock) << 32 | row;
}

// Embedding and slots of new rows; a thread has four columns of one.
FUSEDREC_KERNEL InitialRowsKernel(TableView table, FreshRows fresh, InitialValues initial, int64_t num_rows) {
  const int dim = table.layout.dim;
  const int64_t blocks = (dim + 3) / 4, i = GlobalThread();
  if (i >= num_rows * blocks) return;
  const uint32_t row = fresh.Of(table, i / blocks), block = static_cast<uint32_t>(i % blocks);
  const RowMeta& meta = *table.Meta(row);
  const Four bits = InitialBits(initial.seeds[meta.segment], meta.id, block);
  const StoredRow at = table.At(row);
  for (int d = 4 * block, c = 0; c < 4 && d < dim; ++d, ++c) {
    at.Store(InitialNumber(initial.distribution, initial.a, initial.b, bits.number[c]), d, 0);
    for (int k = 0; k < at.layout.wide_slots; ++k) at.Store(initial.slots[k], (1 + k) * dim + d, 0);
  }
  if (block != 0) return;
  const int wide = dim * (1 + at.layout.wide_slots);
  for (int k = 0; k < at.layout.scalar_slots; ++k) at.Store(initial.slots[at.layout.wide_slots + k], wide + k, 0);
}

// out [out_rows, row_words]: the embedding of where[n], or of handles[inverse[n]] where there are handles; zeros after
// the ids. Rows that are kNowhere are not written. The table is not mixed.
template <typename Word>
FUSEDREC_KERNEL GatherKernel(TableView table, const uint32_t* __restrict__ where, const int64_t* __restrict__ handles,
                             const int32_t* __restrict__ inverse, int64_t num_ids, int64_t row_words, int64_t out_words,
                             Word* __restrict__ out) {
  for (int64_t i = GlobalThread(); i < out_words; i += GridThreads()) {
    const int64_t n = i / row_words;
    Word word{};
    if (n < num_ids) {
      const uint32_t row = handles == nullptr ? where[n] : static_cast<uint32_t>(handles[inverse[n]]);
      if (row == kNowhere) continue;
      word = reinterpret_cast<const Word*>(table.Row(row))[i % row_words];
    }
    out[i] = word;
  }
}

// The same into numbers of another storage.
FUSEDREC_KERNEL GatherConvertedKernel(TableView table, const uint32_t* __restrict__ where,
                                      const int64_t* __restrict__ handles, const int32_t* __restrict__ inverse,
                                      int64_t num_ids, int64_t out_numbers, Storage to, void* __restrict__ out) {
  const int dim = table.layout.dim;
  for (int64_t i = GlobalThread(); i < out_numbers; i += GridThreads()) {
    const int64_t n = i / dim;
    float number = 0.0f;
    if (n < num_ids) {
      const uint32_t row = handles == nullptr ? where[n] : static_cast<uint32_t>(handles[inverse[n]]);
      if (row == kNowhere) continue;
      number = table.At(row).Load(static_cast<int>(i % dim));
    }
    StoreNumber(to, number, out, i);
  }
}

// Initial values into the rows that the gather left alone; a thread has four columns.
FUSEDREC_KERNEL GatherInitialKernel(TableView table, MessageView message, InitialValues initial,
                                    const uint32_t* __restrict__ where, const int64_t* __restrict__ handles,
                                    const int32_t* __restrict__ inverse, Storage to, void* __restrict__ out) {
  const int dim = table.layout.dim;
  const int64_t blocks = (dim + 3) / 4;
  for (int64_t i = GlobalThread(); i < message.num_ids * blocks; i += GridThreads()) {
    const int64_t n = i / blocks;
    if ((handles == nullptr ? where[n] : static_cast<uint32_t>(handles[inverse[n]])) != kNowhere) continue;
    const int64_t run = message.RunOf(0, message.runs - 1, n);
    const uint32_t block = static_cast<uint32_t>(i % blocks);
    const Four bits = InitialBits(initial.seeds[run % message.segments], message.Id(n, run), block);
    for (int d = 4 * block, c = 0; c < 4 && d < dim; ++d, ++c) {
      const float number = InitialNumber(initial.distribution, initial.a, initial.b, bits.number[c]);
      StoreNumber(to, AsStored(table.cold_layout, table.cold_layout.storage, number, d), out, n * dim + d);
    }
  }
}

}  // namespace fusedrec::device_table
