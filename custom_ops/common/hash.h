// The one hash of ids, and how a rank is chosen from it.
//
// Mix64 is MurmurHash3's 64-bit finalizer (A. Appleby, public domain): a bijection of 64-bit integers in which every
// input bit changes every output bit with probability close to 1/2. Everything that needs "a hash of the id" derives
// it from here, so that the parts stay independent on purpose:
//   owner rank      high bits of Mix64(id)              (HashRangeOwner)
//   dedup slots     high bits of Mix64(id ^ kSlotSalt)  (SlotHash)
//   table shards    high bits, lines low bits of Mix64(id ^ kTableSalt)  (TableHash)
// Were they taken from the same bits, a rank that owns one range of the hash would fill one range of its slots.
#pragma once

#include "common/host_device.h"

namespace fusedrec {

FUSEDREC_HOST_DEVICE inline uint64_t Mix64(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return x;
}

FUSEDREC_HOST_DEVICE inline uint64_t SlotHash(int64_t id) {
  constexpr uint64_t kSlotSalt = 0x9e3779b97f4a7c15ULL;  // 2^64 / golden ratio
  return Mix64(static_cast<uint64_t>(id) ^ kSlotSalt);
}

FUSEDREC_HOST_DEVICE inline uint64_t TableHash(int64_t id) {
  constexpr uint64_t kTableSalt = 0xd1b54a32d192ed03ULL;  // any constant that is not the other one
  return Mix64(static_cast<uint64_t>(id) ^ kTableSalt);
}

// The part of one received id in the fingerprint of a message, which is the sum of them in any order. `position`: among the
// ids of the message.
FUSEDREC_HOST_DEVICE inline uint64_t FingerprintOf(int64_t segment, int64_t id, int64_t position) {
  constexpr uint64_t kSegmentSalt = 0x9fb21c651e98df25ULL;  // odd
  const uint64_t key = static_cast<uint64_t>(id) + static_cast<uint64_t>(segment) * kSegmentSalt;
  return TableHash(static_cast<int64_t>(key)) * static_cast<uint64_t>(2 * position + 1);
}

// Distance, in lines of keys, to where a key of a table is looked for next; odd, so that a search visits all lines.
FUSEDREC_HOST_DEVICE inline uint64_t LineStep(uint64_t hash) { return (hash >> 32) | 1; }

// Maps a hash to [0, n) by its range: floor(hash * n / 2^64). Contiguous ranges of the hash belong to one owner.
FUSEDREC_HOST_DEVICE inline uint32_t RangeOf(uint64_t hash, uint32_t n) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__umul64hi(hash, n));
#else
  return static_cast<uint32_t>((static_cast<unsigned __int128>(hash) * n) >> 64);
#endif
}

// Owner of an id in this project's own tables.
FUSEDREC_HOST_DEVICE inline uint32_t HashRangeOwner(int64_t id, uint32_t ranks) {
  return RangeOf(Mix64(static_cast<uint64_t>(id)), ranks);
}

// Owner of an id in TFRA's tables: its `default_partition_fn`, which keeps the low 31 bits in a TensorFlow built with
// CUDA, as the published wheels are. TFRA's checkpoint files are laid out by it.
FUSEDREC_HOST_DEVICE inline uint32_t TfraOwner(int64_t id, uint32_t ranks) {
  return static_cast<uint32_t>((static_cast<uint64_t>(id) & 0x7fffffffULL) % ranks);
}

}  // namespace fusedrec
