// How one row lies in memory: header, embedding, optimizer slots, side by side (MTGRBoost, section 4.1).
//     [ RowHeader | row D x storage | element-wise slots k * D | row-wise slots float32 ]   rounded up to 4 bytes
//
// The row is float32, bfloat16 or float16. Element-wise slots are float32 in a float32 table, and in a 16-bit table
// bfloat16 whatever the row is: sums of squares leave float16's range. Row-wise slots are one number each, float32.
// All arithmetic is float32. A server has rows in int8, too: D numbers in units of a scale, then the scale, float32.
//
// # Stochastic rounding
// A number is rounded up with a probability equal to the discarded part. So updates smaller than half a step of the
// 16-bit grid are not lost on average. The random bits are a hash of (the unrounded number, its column, the table's
// version). A run that is repeated, resumed, or spread over other ranks rounds alike.
#pragma once

#include "hash_table/row_layout.h"

namespace fusedrec {

struct RowHeader {
  uint32_t last;     // clock of the last training lookup
  uint32_t number;   // scratch of that lookup: the row's place among its distinct rows
  uint32_t count;    // training lookups, saturating, as they had decayed at the lookup `last` (Limits::CountAt)
  uint32_t updated;  // version of the table that last changed the row
};

class RowFormat {
 public:
  RowFormat(Storage storage, int dim, int wide_slots, int scalar_slots, bool stochastic)
      : layout_(RowLayout::Of(storage, dim, wide_slots, scalar_slots, stochastic, kRowOffset, sizeof(float))) {}

  const RowLayout& layout() const { return layout_; }
  Storage storage() const { return layout_.storage; }
  int wide_slots() const { return layout_.wide_slots; }
  int scalar_slots() const { return layout_.scalar_slots; }
  int stride() const { return layout_.stride; }  // bytes from one header to the next
  int numbers() const { return layout_.numbers(); }

  static RowHeader* Header(char* row) { return reinterpret_cast<RowHeader*>(row); }
  static char* Payload(char* row) { return row + kRowOffset; }

  // float32 tables only: the numbers in place.
  float* Row(char* row) const { return reinterpret_cast<float*>(row + kRowOffset); }
  float* Wide(char* row) const { return reinterpret_cast<float*>(Payload(row) + layout_.wide_offset); }
  float* Scalars(char* row) const { return reinterpret_cast<float*>(Payload(row) + layout_.scalars_offset); }

  // Row and slots to and from float32 numbers [D | k * D | scalars].
  void Load(const char* row, float* numbers) const;
  void Store(const float* numbers, uint32_t version, char* row) const;
  void CopyRow(const char* row, Storage to, void* out) const;

 private:
  static constexpr int kRowOffset = sizeof(RowHeader);
  RowLayout layout_;
};

// n numbers from one storage to another; rounds to the nearest, ties to even.
void Convert(const void* from, Storage from_storage, int64_t n, Storage to_storage, void* to);

}  // namespace fusedrec
