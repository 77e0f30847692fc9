// Rows to and from the records of row_records.h, byte for byte, so that a checkpoint moves between CPU and GPU.
//
// last, count, updated, pool (uint32 each) | row D | element-wise slots k * D | row-wise slots. Sizes are even, so a warp
// copies a record 16 bits at a time.
#ifndef FUSEDREC_HASH_TABLE_CUDA_RECORDS_CUH_
#define FUSEDREC_HASH_TABLE_CUDA_RECORDS_CUH_

#include "hash_table/cuda/rows.cuh"

namespace fusedrec {
namespace device_table {

constexpr int kRecordThreads = 256;
constexpr int kRecordHeader = 4 * sizeof(uint32_t);

struct RecordLayout {
  int packed_bytes;   // row and element-wise slots, which lie side by side in rows, too
  int scalars_bytes;  // after them in a record; in rows at layout.scalars_offset

  __host__ __device__ explicit RecordLayout(const RowLayout& layout)
      : packed_bytes(layout.wide_offset + layout.wide_slots * layout.dim * BytesOf(layout.slot_storage)),
        scalars_bytes(4 * layout.scalar_slots) {}
  __host__ __device__ int64_t bytes() const { return kRecordHeader + packed_bytes + scalars_bytes; }
};

// Words of 16 bits of row and slots, between a row and the rest of a record; this lane's.
template <typename Copy>
__device__ inline void ForWords(const RecordLayout& record, const RowLayout& layout, const Copy& copy) {
  const int packed = record.packed_bytes / 2, scalars = record.scalars_bytes / 2;
  for (int i = Lane(); i < packed + scalars; i += 32) copy(i, i < packed ? i : layout.scalars_offset / 2 + i - packed);
}

// handles may be null: the first `count` rows.
static __global__ void __launch_bounds__(kRecordThreads)
    ReadRecordsKernel(TableView table, const int64_t* __restrict__ handles, int64_t count, char* __restrict__ records) {
  const int64_t n = GlobalThread() / 32;
  if (n >= count) return;
  const RecordLayout layout(table.layout);
  const uint32_t number = static_cast<uint32_t>(handles == nullptr ? n : handles[n]);
  const uint16_t* const row = reinterpret_cast<const uint16_t*>(table.Row(number));
  uint16_t* const record = reinterpret_cast<uint16_t*>(records + n * layout.bytes());
  if (Lane() < 4) {
    const RowMeta& meta = *table.Meta(number);
    const uint32_t word = Lane() == 0 ? meta.last : Lane() == 1 ? meta.count : Lane() == 2 ? meta.updated : 0;
    record[2 * Lane()] = static_cast<uint16_t>(word);  // a record may begin at any even address
    record[2 * Lane() + 1] = static_cast<uint16_t>(word >> 16);
  }
  ForWords(layout, table.layout, [&](int to, int from) { record[kRecordHeader / 2 + to] = row[from]; });
}

// The rows of handles[inverse[n]]; *last becomes at least that of every record.
static __global__ void __launch_bounds__(kRecordThreads)
    WriteRecordsKernel(TableView table, const int64_t* __restrict__ handles, const int32_t* __restrict__ inverse,
                       int64_t count, const char* __restrict__ records, unsigned* last) {
  const int64_t n = GlobalThread() / 32;
  if (n >= count) return;
  const RecordLayout layout(table.layout);
  const uint32_t number = static_cast<uint32_t>(handles[inverse[n]]);
  uint16_t* const row = reinterpret_cast<uint16_t*>(table.Row(number));
  const uint16_t* const record = reinterpret_cast<const uint16_t*>(records + n * layout.bytes());
  if (Lane() < 3) {
    const uint32_t word = record[2 * Lane()] | static_cast<uint32_t>(record[2 * Lane() + 1]) << 16;
    RowMeta* const meta = table.Meta(number);
    *(Lane() == 0 ? &meta->last : Lane() == 1 ? &meta->count : &meta->updated) = word;
    if (Lane() == 0) atomicMax(last, word);
  }
  ForWords(layout, table.layout, [&](int from, int to) { row[to] = record[kRecordHeader / 2 + from]; });
}

}  // namespace device_table
}  // namespace fusedrec

#endif  // FUSEDREC_HASH_TABLE_CUDA_RECORDS_CUH_
