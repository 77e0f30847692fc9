// The embedding structure: rows of one format in chunks that never move (MTGRBoost, section 4.1).
//
// A pool hands out blocks of row numbers. A chunk is mapped when its first row is needed, together with the chunk after
// it. So running out of memory shows one chunk early, and an insertion never waits for a copy. Rows are memory, or
// pages of a file on disk for rows beyond the memory budget of a table.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "hash_table/cpu/rows/pages.h"
#include "hash_table/cpu/rows/row_format.h"

namespace fusedrec {

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
  // Bytes mapped for rows.
  size_t bytes() const;

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

}  // namespace fusedrec
