#include "hash_table/cpu/rows/row_format.h"

#include "common/simd.h"

namespace fusedrec {
namespace {

FUSEDREC_CLONES void WidenBfloat16(const uint16_t* __restrict__ from, int64_t n, float* __restrict__ to) {
  for (int64_t i = 0; i < n; ++i) to[i] = FromBfloat16(from[i]);
}
FUSEDREC_CLONES void WidenFloat16(const uint16_t* __restrict__ from, int64_t n, float* __restrict__ to) {
  for (int64_t i = 0; i < n; ++i) to[i] = FromFloat16(from[i]);
}
FUSEDREC_CLONES void WidenInt8(const int8_t* __restrict__ from, float scale, int64_t n, float* __restrict__ to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]) * scale;
}
FUSEDREC_CLONES void NarrowBfloat16(const float* __restrict__ from, int64_t n, uint16_t* __restrict__ to) {
  for (int64_t i = 0; i < n; ++i) to[i] = ToBfloat16(from[i], NearestBelow(BitsOf(from[i]), 16));
}
FUSEDREC_CLONES void NarrowFloat16(const float* __restrict__ from, int64_t n, uint16_t* __restrict__ to) {
  for (int64_t i = 0; i < n; ++i) to[i] = ToFloat16(from[i], false, 0);
}
FUSEDREC_CLONES void RoundBfloat16(const float* __restrict__ from, int64_t n, uint32_t column, uint32_t version,
                                   uint16_t* __restrict__ to) {
  for (int64_t i = 0; i < n; ++i) to[i] = ToBfloat16(from[i], RandomBits(BitsOf(from[i]), column + i, version) >> 16);
}
FUSEDREC_CLONES void RoundFloat16(const float* __restrict__ from, int64_t n, uint32_t column, uint32_t version,
                                  uint16_t* __restrict__ to) {
  for (int64_t i = 0; i < n; ++i) to[i] = ToFloat16(from[i], true, RandomBits(BitsOf(from[i]), column + i, version));
}

void Widen(const void* from, Storage storage, int64_t n, float* to) {
  const uint16_t* narrow = static_cast<const uint16_t*>(from);
  if (storage == Storage::kFloat32) std::memcpy(to, from, 4 * n);
  if (storage == Storage::kBfloat16) WidenBfloat16(narrow, n, to);
  if (storage == Storage::kFloat16) WidenFloat16(narrow, n, to);
  if (storage == Storage::kInt8) {
    const int8_t* const steps = static_cast<const int8_t*>(from);
    float scale;
    std::memcpy(&scale, steps + n, sizeof(scale));
    WidenInt8(steps, scale, n, to);
  }
}

void Narrow(const float* from, int64_t n, Storage storage, void* to) {
  uint16_t* narrow = static_cast<uint16_t*>(to);
  if (storage == Storage::kFloat32) std::memcpy(to, from, 4 * n);
  if (storage == Storage::kBfloat16) NarrowBfloat16(from, n, narrow);
  if (storage == Storage::kFloat16) NarrowFloat16(from, n, narrow);
}

void NarrowStochastically(const float* from, int64_t n, uint32_t column, uint32_t version, Storage storage, void* to) {
  uint16_t* narrow = static_cast<uint16_t*>(to);
  if (storage == Storage::kBfloat16) RoundBfloat16(from, n, column, version, narrow);
  if (storage == Storage::kFloat16) RoundFloat16(from, n, column, version, narrow);
}

}  // namespace

void RowFormat::Load(const char* row, float* numbers) const {
  const RowLayout& at = layout_;
  row += kRowOffset;
  Widen(row, at.storage, at.dim, numbers);
  Widen(row + at.wide_offset, at.slot_storage, int64_t{at.wide_slots} * at.dim, numbers + at.dim);
  std::memcpy(numbers + at.dim * (1 + at.wide_slots), row + at.scalars_offset, 4 * at.scalar_slots);
}

void RowFormat::Store(const float* numbers, uint32_t version, char* row) const {
  const RowLayout& at = layout_;
  const int64_t wide = int64_t{at.wide_slots} * at.dim;
  row += kRowOffset;
  if (at.stochastic) {
    NarrowStochastically(numbers, at.dim, 0, version, at.storage, row);
    NarrowStochastically(numbers + at.dim, wide, at.dim, version, at.slot_storage, row + at.wide_offset);
  } else {
    Narrow(numbers, at.dim, at.storage, row);
    Narrow(numbers + at.dim, wide, at.slot_storage, row + at.wide_offset);
  }
  std::memcpy(row + at.scalars_offset, numbers + at.dim * (1 + at.wide_slots), 4 * at.scalar_slots);
}

void RowFormat::CopyRow(const char* row, Storage to, void* out) const {
  Convert(row + kRowOffset, layout_.storage, layout_.dim, to, out);
}

void Convert(const void* from, Storage from_storage, int64_t n, Storage to_storage, void* to) {
  if (from_storage == to_storage) {
    std::memcpy(to, from, n * BytesOf(to_storage));
  } else if (to_storage == Storage::kFloat32) {
    Widen(from, from_storage, n, static_cast<float*>(to));
  } else if (from_storage == Storage::kFloat32) {
    Narrow(static_cast<const float*>(from), n, to_storage, to);
  } else {  // between the two 16-bit types, a piece at a time
    constexpr int64_t kPiece = 64;
    float numbers[kPiece];
    for (int64_t i = 0; i < n; i += kPiece) {
      const int64_t piece = n - i < kPiece ? n - i : kPiece;
      Widen(static_cast<const uint16_t*>(from) + i, from_storage, piece, numbers);
      Narrow(numbers, piece, to_storage, static_cast<uint16_t*>(to) + i);
    }
  }
}

}  // namespace fusedrec
