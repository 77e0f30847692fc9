// The embedding structure on a GPU: rows in chunks that never move (MTGRBoost, section 4.1).
//
// A chunk is for a power of two of rows. It holds the RowMeta of each row, a part of the stack of free rows, and the rows.
// Metas lie apart from rows, so that eviction and export read nothing else, in one stream. A meta is one sector of memory
// and names the key of its row, so that the lines can drop the keys of evicted rows.
//
// Row r lies in chunk r >> chunk_bits and keeps its number for life. A row has the layout of row_format.h: embedding,
// element-wise slots, row-wise slots.
#ifndef FUSEDREC_HASH_TABLE_CUDA_ROWS_CUH_
#define FUSEDREC_HASH_TABLE_CUDA_ROWS_CUH_

#include "hash_table/cuda/lines.cuh"
#include "hash_table/storage.h"
#include "hash_table/table_limits.h"
#include "initial_rows/initial_number.h"

namespace fusedrec {
namespace device_table {

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
    return meta.last + window > clock || AttemptOf(meta.touch) == attempt ||
           (waiting_since != 0 && meta.last >= waiting_since);
  }
};

// The condition for rows that expire at the lookup of these pins.
struct HasExpired {
  Pins pins;
  const Limits* limits;  // [segments]; null: no row expires

  __device__ bool operator()(uint32_t, const RowMeta& meta) const {
    if (limits == nullptr || meta.segment == kNobody) return false;
    const Limits& of = limits[meta.segment];
    return of.IsOver(meta.last, pins.clock, pins.window) && of.ExpireAt(pins.clock) && !pins.Hold(meta);
  }
};

// A row that left.
struct LeftRow {
  int64_t id;
  uint32_t segment, noted;  // noted: the row was trained since the last average of replicas
};

struct RowLayout {
  int dim, wide_slots, scalar_slots;
  Storage storage, slot_storage;
  bool stochastic;
  bool noted;  // a byte of each row says that it was trained since the last average of replicas
  int wide_offset, scalars_offset, stride;  // bytes; rows begin at multiples of 16
};

// A table, as its kernels see it.
struct TableView {
  char* const* chunks;
  const SegmentLines* segments;
  const SegmentLines* candidates;  // of ids that wait for admission
  const Limits* limits;            // [segments]
  RowLayout layout;
  int chunk_bits;

  __device__ char* Chunk(uint32_t row) const { return chunks[row >> chunk_bits]; }
  __device__ uint32_t InChunk(uint32_t row) const { return row & ((1u << chunk_bits) - 1); }
  __device__ RowMeta* Meta(uint32_t row) const { return reinterpret_cast<RowMeta*>(Chunk(row)) + InChunk(row); }
  // Place i of the stack of free rows.
  __device__ uint32_t* Free(uint32_t i) const {
    return reinterpret_cast<uint32_t*>(Chunk(i) + (sizeof(RowMeta) << chunk_bits)) + InChunk(i);
  }
  __device__ char* Row(uint32_t row) const {
    return Chunk(row) + ((sizeof(RowMeta) + sizeof(uint32_t)) << chunk_bits) +
           static_cast<int64_t>(InChunk(row)) * layout.stride;
  }
  __device__ uint8_t* Note(uint32_t row) const {
    return reinterpret_cast<uint8_t*>(Chunk(row) + ((sizeof(RowMeta) + sizeof(uint32_t) + layout.stride) << chunk_bits)) +
           InChunk(row);
  }
};

inline int64_t ChunkBytes(const RowLayout& layout, int chunk_bits) {
  return (static_cast<int64_t>(sizeof(RowMeta) + sizeof(uint32_t)) + layout.stride + layout.noted) << chunk_bits;
}

// Rows of new ids: the top of the stack, then rows that nobody ever had.
struct FreshRows {
  int64_t free;   // height of the stack
  uint32_t next;  // the first row that nobody ever had

  __device__ uint32_t Of(const TableView& table, int64_t rank) const {
    return rank < free ? *table.Free(static_cast<uint32_t>(free - 1 - rank)) : next + static_cast<uint32_t>(rank - free);
  }
};

// Values of rows that were never trained.
struct InitialValues {
  Distribution distribution;
  double a, b;
  const uint64_t* seeds;  // [segments]
  float first_slot;       // of the first element-wise, or row-wise, slot; others begin with 0
};

// One number of a row of another storage, as if read from a row of the table.
__device__ inline float AsStored(const RowLayout& layout, float x, uint32_t column) {
  if (layout.storage == Storage::kFloat32) return x;
  uint16_t stored;
  StoreNumber(layout.storage, x, &stored, 0, layout.stochastic, column, 0);
  return LoadNumber(layout.storage, &stored, 0);
}

}  // namespace device_table
}  // namespace fusedrec

#endif  // FUSEDREC_HASH_TABLE_CUDA_ROWS_CUH_
