#include "hash_table/cpu/rows/row_format.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/simd.h"

namespace fusedrec {
namespace {

FUSEDREC_CLONES void WidenBfloat16(const uint16_t* __restrict__ from, int64_t n, float* __restrict__ to) {
  for (int64_t i = 0; i < n; ++i) to[i] = FromBfloat16(from[i]);
}
FUSEDREC_CLONES void WidenFloat16(const uint16_t* __restrict__ from, int64_t n, float* __restrict__ to) {
  for (int64_t i = 0; i < n; ++i) to[i] = FromFloat16(from[i]);
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

RowFormat::RowFormat(Storage storage, int dim, int wide_slots, int scalar_slots, bool stochastic)
    : storage_(storage),
      stochastic_(stochastic && storage != Storage::kFloat32),
      dim_(dim),
      wide_slots_(wide_slots),
      scalar_slots_(scalar_slots) {
  wide_offset_ = kRowOffset + dim * BytesOf(storage);
  scalars_offset_ = wide_offset_ + wide_slots * dim * BytesOf(slot_storage());
  scalars_offset_ = (scalars_offset_ + 3) / 4 * 4;  // float32 wants its alignment after an odd number of 16-bit ones
  stride_ = (scalars_offset_ + 4 * scalar_slots + 7) / 8 * 8;
}

void RowFormat::Load(const char* row, float* numbers) const {
  Widen(row + kRowOffset, storage_, dim_, numbers);
  Widen(row + wide_offset_, slot_storage(), int64_t{wide_slots_} * dim_, numbers + dim_);
  std::memcpy(numbers + dim_ * (1 + wide_slots_), row + scalars_offset_, 4 * scalar_slots_);
}

void RowFormat::Store(const float* numbers, uint32_t version, char* row) const {
  const int64_t wide = int64_t{wide_slots_} * dim_;
  if (stochastic_) {
    NarrowStochastically(numbers, dim_, 0, version, storage_, row + kRowOffset);
    NarrowStochastically(numbers + dim_, wide, dim_, version, slot_storage(), row + wide_offset_);
  } else {
    Narrow(numbers, dim_, storage_, row + kRowOffset);
    Narrow(numbers + dim_, wide, slot_storage(), row + wide_offset_);
  }
  std::memcpy(row + scalars_offset_, numbers + dim_ * (1 + wide_slots_), 4 * scalar_slots_);
}

void RowFormat::CopyRow(const char* row, Storage to, void* out) const {
  Convert(row + kRowOffset, storage_, dim_, to, out);
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
