// The records of row_records.h, as kernels see them.
//
// last, count, updated, pool (uint32 each) | row D | element-wise slots k * D | row-wise slots. Sizes are even, so a warp
// copies a record 16 bits at a time. Records of a mixed table hold float32 numbers, also of its 16-bit rows (pool 1).
#pragma once

#include "hash_table/cuda/rows.cuh"

namespace fusedrec {
namespace device_table {

constexpr int kRecordHeader = 4 * sizeof(uint32_t);

struct RecordLayout {
  int packed_bytes;   // row and element-wise slots, which lie side by side in rows, too
  int scalars_bytes;  // after them in a record; in rows at layout.scalars_offset

  __host__ __device__ explicit RecordLayout(const RowLayout& layout)
      : packed_bytes(layout.wide_offset + layout.wide_slots * layout.dim * BytesOf(layout.slot_storage)),
        scalars_bytes(4 * layout.scalar_slots) {}
  __host__ __device__ int64_t bytes() const { return kRecordHeader + packed_bytes + scalars_bytes; }
};

// Word i of 32 bits. A record may begin at any even address.
__device__ inline uint32_t WordOf(const uint16_t* record, int i) {
  return record[2 * i] | static_cast<uint32_t>(record[2 * i + 1]) << 16;
}
__device__ inline void PutWord(uint32_t word, int i, uint16_t* record) {
  record[2 * i] = static_cast<uint16_t>(word);
  record[2 * i + 1] = static_cast<uint16_t>(word >> 16);
}
constexpr int kRecordUpdated = 2, kRecordPool = 3;  // words

}  // namespace device_table
}  // namespace fusedrec
