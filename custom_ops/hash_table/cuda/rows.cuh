// The embedding structure on a GPU: rows in chunks that never move (MTGRBoost, section 4.1).
//
// A chunk is for a power of two of rows. It holds the RowMeta of each row, a part of the stack of free rows, and the rows.
// Metas lie apart from rows, so that eviction and export read nothing else, in one stream. A meta is one sector of memory
// and names the key of its row, so that the lines can drop the keys of evicted rows.
//
// Row r lies in chunk r >> chunk_bits and keeps its number for life. A row has the layout of row_format.h: embedding,
// element-wise slots, row-wise slots.
//
// The chunk of a mixed table holds a place for each row instead. It names one of two pools and the number there, so a row
// that moves between the pools keeps its number, and with it its key and its handles (mixed.cu).
#pragma once

#include "hash_table/cuda/lines.cuh"
#include "hash_table/row_layout.h"
#include "hash_table/table_limits.h"
#include "initial_rows/initial_number.h"

namespace fusedrec::device_table {

constexpr uint32_t kNobody = 0xffffffffu;  // segment of a row that nobody has

struct __align__(32) RowMeta {
  unsigned long long touch;  // TouchOf the last attempt at a lookup, on which its ids of this row agree
  int64_t id;
  uint32_t segment;
  uint32_t last;     // clock of the last training lookup that came to its end
  uint32_t count;    // training lookups, saturating
  uint32_t updated;  // version of the table that last changed the row
};
static_assert(sizeof(RowMeta) == 32, "a meta is one sector");

// Larger for a later attempt, and within one for a smaller position.
__device__ inline unsigned long long TouchOf(uint32_t attempt, uint32_t position) {
  return static_cast<unsigned long long>(attempt) << 32 | static_cast<uint32_t>(~position);
}
__device__ inline uint32_t AttemptOf(unsigned long long touch) { return static_cast<uint32_t>(touch >> 32); }
__device__ inline uint32_t PositionOf(unsigned long long touch) { return ~static_cast<uint32_t>(touch); }

constexpr uint32_t kNoAttempt = 0xffffffffu;  // of pins outside a lookup

// Rows that may not leave: the rows of the last `window` lookups, of the running one, and of every lookup since the first
// one whose gradients wait (0: none do).
struct Pins {
  uint32_t clock, attempt;
  int64_t window;
  uint32_t waiting_since;

  __device__ bool Hold(const RowMeta& meta) const {
    return IsPinned(meta.last, clock, window, waiting_since) || AttemptOf(meta.touch) == attempt;
  }
};

// The condition for rows that expire at the lookup of these pins.
struct HasExpired {
  Pins pins;
  const Limits* limits;  // [segments]; null: no row expires

  __device__ bool operator()(uint32_t, const RowMeta& meta) const {
    if (limits == nullptr || meta.segment == kNobody) return false;
    const Limits& of = limits[meta.segment];
    return of.IsOver(meta.last, pins.clock, pins.window) && !pins.Hold(meta) &&
           of.ExpiredAt(pins.clock).Hold(ShardOf(TableHash(meta.id)));
  }
};

struct LeftRow {
  int64_t id;
  uint32_t segment, noted;  // noted: the row was trained since the last average of replicas
};

struct StoredRow {
  RowLayout layout;
  char* data;

  // Number j of [embedding | element-wise slots | row-wise slots].
  __device__ float Load(int j) const {
    if (j < layout.dim) return LoadNumber(layout.storage, data, j);
    const int wide = layout.dim * (1 + layout.wide_slots);
    if (j < wide) return LoadNumber(layout.slot_storage, data + layout.wide_offset, j - layout.dim);
    return reinterpret_cast<const float*>(data + layout.scalars_offset)[j - wide];
  }
  __device__ void Store(float x, int j, uint32_t version) const {
    const int wide = layout.dim * (1 + layout.wide_slots);
    const uint32_t column = static_cast<uint32_t>(j);
    if (j < layout.dim) {
      StoreNumber(layout.storage, x, data, j, layout.stochastic, column, version);
    } else if (j < wide) {
      StoreNumber(layout.slot_storage, x, data + layout.wide_offset, j - layout.dim, layout.stochastic, column, version);
    } else {
      reinterpret_cast<float*>(data + layout.scalars_offset)[j - wide] = x;
    }
  }
};

constexpr uint32_t kColdBit = 0x80000000u;  // of a place: in the pool of 16-bit rows

// Rows of one storage under their places, in chunks: a part of the stack of free places, then rows.
struct PoolView {
  char* const* chunks;
  int stride, chunk_bits;

  __device__ uint32_t InChunk(uint32_t place) const { return place & ((1u << chunk_bits) - 1); }
  __device__ uint32_t* Free(uint32_t i) const {
    return reinterpret_cast<uint32_t*>(chunks[i >> chunk_bits]) + InChunk(i);
  }
  __device__ char* Row(uint32_t place) const {
    return chunks[place >> chunk_bits] + (sizeof(uint32_t) << chunk_bits) +
           static_cast<int64_t>(InChunk(place)) * stride;
  }
};

struct TableView {
  char* const* chunks;
  const SegmentLines* segments;
  const SegmentLines* candidates;  // of ids that wait for admission
  const Limits* limits;            // [segments]
  RowLayout layout;       // of a mixed table: of its float32 rows
  RowLayout cold_layout;  // of rows that were never trained, and of all 16-bit rows of a mixed table
  PoolView hot, cold;     // of a mixed table
  int row_bytes;          // in a chunk: of a row, or of its place
  int chunk_bits;
  bool mixed;

  __device__ char* Chunk(uint32_t row) const { return chunks[row >> chunk_bits]; }
  __device__ uint32_t InChunk(uint32_t row) const { return row & ((1u << chunk_bits) - 1); }
  __device__ RowMeta* Meta(uint32_t row) const { return reinterpret_cast<RowMeta*>(Chunk(row)) + InChunk(row); }
  __device__ uint32_t* Free(uint32_t i) const {
    return reinterpret_cast<uint32_t*>(Chunk(i) + (sizeof(RowMeta) << chunk_bits)) + InChunk(i);
  }
  __device__ char* Row(uint32_t row) const {
    return Chunk(row) + ((sizeof(RowMeta) + sizeof(uint32_t)) << chunk_bits) +
           static_cast<int64_t>(InChunk(row)) * row_bytes;
  }
  // The place of the row of a mixed table.
  __device__ uint32_t* Place(uint32_t row) const { return reinterpret_cast<uint32_t*>(Row(row)); }
  __device__ bool IsHot(uint32_t row) const { return (*Place(row) & kColdBit) == 0; }
  __device__ StoredRow AtPlace(uint32_t place) const {
    if ((place & kColdBit) == 0) return {layout, hot.Row(place)};
    return {cold_layout, cold.Row(place & ~kColdBit)};
  }
  __device__ StoredRow At(uint32_t row) const {
    if (mixed) return AtPlace(*Place(row));
    return {layout, Row(row)};
  }
  __device__ uint8_t* Note(uint32_t row) const {
    return reinterpret_cast<uint8_t*>(Chunk(row) + ((sizeof(RowMeta) + sizeof(uint32_t) + row_bytes) << chunk_bits)) +
           InChunk(row);
  }
};

// row_bytes: as in TableView.
inline int64_t ChunkBytes(int row_bytes, bool noted, int chunk_bits) {
  return (static_cast<int64_t>(sizeof(RowMeta) + sizeof(uint32_t)) + row_bytes + noted) << chunk_bits;
}
inline int64_t PoolChunkBytes(const RowLayout& layout, int chunk_bits) {
  return (static_cast<int64_t>(sizeof(uint32_t)) + layout.stride) << chunk_bits;
}

// Rows of new ids, or places in a pool: the top of the stack, then those that nobody ever had.
struct FreshRows {
  int64_t free;   // height of the stack
  uint32_t next;  // the first that nobody ever had

  // stack: TableView or PoolView.
  template <typename Stack>
  __device__ uint32_t Of(const Stack& stack, int64_t rank) const {
    return rank < free ? *stack.Free(static_cast<uint32_t>(free - 1 - rank)) : next + static_cast<uint32_t>(rank - free);
  }
};

// Places that rows of a mixed table give back. Threads take ranks as they come: the order of places shows in no result.
struct GivenBack {
  int64_t hot, cold;          // heights of the stacks before
  unsigned long long* gone;   // [2] places that were given back, hot and cold

  __device__ void Add(const TableView& table, uint32_t place) const {
    const bool is_cold = (place & kColdBit) != 0;
    const int64_t rank = static_cast<int64_t>(atomicAdd(&gone[is_cold], 1ull));
    *(is_cold ? table.cold : table.hot).Free(static_cast<uint32_t>((is_cold ? cold : hot) + rank)) = place & ~kColdBit;
  }
};

constexpr int kMostSlots = 3;

struct InitialValues {
  Distribution distribution;
  double a, b;
  const uint64_t* seeds;  // [segments]
  float slots[kMostSlots];  // of a row's slots, then of its row slots
};

// One number of a row that was never trained, as if read from the table.
__device__ inline float AsStored(const RowLayout& layout, Storage storage, float x, uint32_t column) {
  if (storage == Storage::kFloat32) return x;
  uint16_t stored;
  StoreNumber(storage, x, &stored, 0, layout.stochastic, column, 0);
  return LoadNumber(storage, &stored, 0);
}

// Word i of 32 bits. A record may begin at any even address.
__device__ inline uint32_t WordOf(const uint16_t* record, int i) {
  return record[2 * i] | static_cast<uint32_t>(record[2 * i + 1]) << 16;
}
__device__ inline void PutWord(uint32_t word, int i, uint16_t* record) {
  record[2 * i] = static_cast<uint16_t>(word);
  record[2 * i + 1] = static_cast<uint16_t>(word >> 16);
}
constexpr int kRecordUpdated = 2, kRecordPool = 3;  // words

}  // namespace fusedrec::device_table
