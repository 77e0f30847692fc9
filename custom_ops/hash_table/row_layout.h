// A row as both compilers read it: how its numbers lie in memory and in records, and what its counters say.
#pragma once

#include "common/host_device.h"
#include "hash_table/storage.h"

namespace fusedrec {

// Bytes from the first number of a row: row, element-wise slots, row-wise slots.
struct RowLayout {
  int dim, wide_slots, scalar_slots;
  Storage storage, slot_storage;
  bool stochastic;
  bool noted;  // on a GPU: a byte of each row says that it was trained since the last average of replicas
  int wide_offset, scalars_offset, stride;

  // Rows begin at multiples of `alignment` bytes, after a header of a multiple of 4.
  static RowLayout Of(Storage storage, int dim, int wide_slots, int scalar_slots, bool stochastic, int header,
                      int alignment) {
    RowLayout layout{dim, wide_slots, scalar_slots, storage, Storage::kFloat32, false, false, 0, 0, 0};
    if (storage != Storage::kFloat32) layout.slot_storage = Storage::kBfloat16;
    layout.stochastic = stochastic && storage != Storage::kFloat32;
    layout.wide_offset = dim * BytesOf(storage) + (storage == Storage::kInt8 ? sizeof(float) : 0);
    const int wide_end = layout.wide_offset + wide_slots * dim * BytesOf(layout.slot_storage);
    layout.scalars_offset = (wide_end + 3) / 4 * 4;  // float32 wants its alignment after an odd number of 16-bit ones
    const int end = header + layout.scalars_offset + 4 * scalar_slots;
    layout.stride = (end + alignment - 1) / alignment * alignment;
    return layout;
  }
  FUSEDREC_HOST_DEVICE int numbers() const { return dim * (1 + wide_slots) + scalar_slots; }
};

constexpr int kRecordHeader = 4 * sizeof(uint32_t);

// A record of a checkpoint: last, count, updated, pool (uint32 each) | row D | element-wise slots k * D | row-wise slots.
// Sizes are even, so a warp copies a record 16 bits at a time. Records of a mixed table hold float32 numbers, also of its
// 16-bit rows (pool 1).
struct RecordLayout {
  int packed_bytes;   // row and element-wise slots, which lie side by side in rows, too
  int scalars_bytes;  // after them in a record; in rows at layout.scalars_offset

  FUSEDREC_HOST_DEVICE explicit RecordLayout(const RowLayout& layout)
      : packed_bytes(layout.wide_offset + layout.wide_slots * layout.dim * BytesOf(layout.slot_storage)),
        scalars_bytes(4 * layout.scalar_slots) {}
  FUSEDREC_HOST_DEVICE int64_t bytes() const { return kRecordHeader + packed_bytes + scalars_bytes; }
};

// A moment in a table's life, as TableClock gives it. Both are 0 at its beginning.
struct Moment {
  uint32_t lookups = 0, version = 0;

  FUSEDREC_HOST_DEVICE bool IsBeginning() const { return lookups == 0 && version == 0; }
  // Returns whether an update changed the row, or a training lookup touched it, after this moment.
  FUSEDREC_HOST_DEVICE bool IsBefore(uint32_t last, uint32_t updated) const { return updated > version || last > lookups; }
};

// Returns whether a row that the lookup `last` touched may be in use at the lookup `now`: it is of the last `window` lookups,
// or of a lookup since the first one whose gradients wait (0: none do).
FUSEDREC_HOST_DEVICE inline bool IsPinned(uint32_t last, uint32_t now, int64_t window, uint32_t waiting_since) {
  return last + window > now || (waiting_since != 0 && last >= waiting_since);
}

}  // namespace fusedrec
