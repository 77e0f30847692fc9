// The rows of a table under their handles, in one pool or two.
//
// Pool 0 is memory. Pool 1 holds rows in 16 bits (hot_after) or rows in a file (memory_budget); other tables have none.
// A handle is the number of a row with its pool in the highest bit. It names the same memory for the life of the store.
#pragma once

#include <atomic>
#include <memory>

#include "hash_table/cpu/rows/pages.h"
#include "hash_table/cpu/rows/row_format.h"
#include "hash_table/table.h"

namespace fusedrec {

// Rows of one format in chunks that never move (MTGRBoost, section 4.1), in memory or in a file.
//
// A pool hands out blocks of row numbers. A chunk is mapped when its first row is needed, together with the chunk after
// it. So running out of memory shows one chunk early, and an insertion never waits for a copy.
class RowPool {
 public:
  static constexpr uint32_t kBlockRows = 32;  // handed out at once
  // The last block of the 2^31 numbers is never handed out: the last row of pool 1 would have the handle kAbsent.
  static constexpr uint32_t kMaxRows = (uint32_t{1} << 31) - kBlockRows;

  // folder: of the file that holds the rows; empty for memory.
  static absl::StatusOr<std::unique_ptr<RowPool>> Make(const RowFormat& format, const std::string& folder);
  ~RowPool();

  const RowFormat& format() const { return format_; }
  char* Row(uint32_t number) const {
    return chunks_[number >> chunk_bits_].load(std::memory_order_acquire) +
           static_cast<size_t>(number & chunk_mask_) * format_.stride();
  }
  // Numbers [*first, *first + kBlockRows) of rows that nobody had before. Any thread.
  absl::Status TakeBlock(uint32_t* first);
  // Rows handed out so far, a row number's limit.
  uint32_t rows() const { return next_.load(std::memory_order_acquire); }
  size_t bytes() const;  // mapped

 private:
  RowPool(const RowFormat& format, int file);
  absl::Status MapChunk(size_t chunk);

  const RowFormat format_;
  const int file_;  // -1: memory
  int chunk_bits_;
  uint32_t chunk_mask_;
  std::vector<std::atomic<char*>> chunks_;  // as many as kMaxRows need, null after the last
  std::atomic<uint32_t> next_{0};           // changed under the mutex
  mutable std::mutex mutex_;                // guards the members below
  std::vector<Pages> pages_;
};

class RowStore {
 public:
  // Rows of one shard that no id has. The shard's mutex guards them.
  struct Spare {
    std::vector<uint32_t> free[2];     // row numbers, by pool
    std::vector<uint32_t> given_back;  // handles; a reader may still look at these rows
  };

  // Makes the pools; comes before every other call. Fails when there is no memory, or no file in tier_folder.
  absl::Status Open(const TableSpec& spec);

  static int PoolOf(uint32_t handle) { return handle >> 31; }
  char* Row(uint32_t handle) const { return pools_[PoolOf(handle)]->Row(handle & ~kPoolBit); }
  RowHeader* Header(uint32_t handle) const { return RowFormat::Header(Row(handle)); }
  const RowFormat& format(int pool) const { return pools_[pool]->format(); }
  bool HasPool(int pool) const { return pools_[pool] != nullptr; }
  bool IsHandle(uint32_t handle) const {
    const RowPool* pool = pools_[PoolOf(handle)].get();
    return pool != nullptr && (handle & ~kPoolBit) < pool->rows();
  }

  // Asks the memory for the header of a row, or for header and embedding.
  void FetchHeader(uint32_t handle) const { __builtin_prefetch(Row(handle), 1); }
  void Fetch(uint32_t handle) const { FetchLines<0>(Row(handle), fetch_bytes_[PoolOf(handle)]); }
  // Asks the memory for all of a row, to be written.
  void FetchForUpdate(uint32_t handle) const { FetchLines<1>(Row(handle), format(PoolOf(handle)).stride()); }

  absl::Status Take(Spare* spare, int pool, uint32_t* handle);
  // Returns a row. Another id gets it only after Reuse.
  void GiveBack(Spare* spare, uint32_t handle);
  // Makes the returned rows free. The caller knows that nobody looks at them.
  static void Reuse(Spare* spare);

  // Rows that ids have, and bytes as mapped.
  int64_t size(int pool) const { return size_[pool].load(std::memory_order_relaxed); }
  int64_t bytes(int pool) const { return HasPool(pool) ? pools_[pool]->bytes() : 0; }

 private:
  static constexpr uint32_t kPoolBit = uint32_t{1} << 31;

  template <int kToWrite>
  static void FetchLines(const char* row, int bytes) {
    for (int offset = 0; offset < bytes; offset += 64) __builtin_prefetch(row + offset, kToWrite);
    __builtin_prefetch(row + bytes - 1, kToWrite);  // rows begin anywhere in a line
  }

  std::unique_ptr<RowPool> pools_[2];
  int fetch_bytes_[2] = {0, 0};  // by pool
  std::atomic<int64_t> size_[2] = {{0}, {0}};
};

}  // namespace fusedrec
