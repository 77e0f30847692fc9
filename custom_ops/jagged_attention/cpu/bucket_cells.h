// Thresholds of time differences, prepared for the tile engine: each bucket is found with a table look-up and few
// comparisons, exactly, from integers.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "jagged_attention/cpu/tile_engine.h"

namespace fusedrec {

// Distinct thresholds, and which bucket each number of them stands for: equal thresholds leave buckets empty.
struct DistinctBuckets {
  std::vector<int64_t> thresholds;  // [D], ascending
  std::vector<int64_t> bucket;      // [D+1], bucket[d] = number of thresholds <= a difference with d distinct ones
};

// thresholds: [J], not decreasing (caller checks).
DistinctBuckets MakeDistinct(absl::Span<const int64_t> thresholds);

// Memory behind a BucketCells.
class CellTable {
 public:
  // thresholds: distinct, ascending.
  explicit CellTable(absl::Span<const int64_t> thresholds);

  BucketCells cells() const;

 private:
  // Cells of 2^-mantissa_bits of an octave; the most comparisons that one of them needs.
  int32_t Fill(int mantissa_bits);

  std::vector<int32_t> begin_;
  std::vector<int32_t> thresholds_;
  int64_t num_thresholds_;  // below INT32_MAX; larger ones are never reached
  int32_t shift_ = 0;
  int32_t probes_ = 0;
};

}  // namespace fusedrec
