// A relative bias in the form that the tile engine works with: position weights in reverse, distinct thresholds, and cells
// that lead from a time difference to its bucket with few comparisons, exactly, from integers.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "jagged_attention/cpu/tile_engine.h"

namespace fusedrec {

// Memory behind a BucketCells.
class CellTable {
 public:
  // thresholds: distinct, ascending.
  explicit CellTable(absl::Span<const int64_t> thresholds);

  BucketCells cells() const;

 private:
  // Cells of 2^-mantissa_bits of an octave; returns the most comparisons that one of them needs.
  int32_t Fill(int mantissa_bits);

  std::vector<int32_t> begin_;
  std::vector<int32_t> thresholds_;
  int64_t num_thresholds_;  // below INT32_MAX; larger ones are never reached
  int32_t shift_ = 0;
  int32_t probes_ = 0;
};

// Owns what its tables point to, but for the times.
class PreparedBias {
 public:
  explicit PreparedBias(const RelativeBias& bias);
  PreparedBias(const PreparedBias&) = delete;
  PreparedBias& operator=(const PreparedBias&) = delete;

  const BiasTables& tables() const { return tables_; }

  // Numbers that a unit sums up for the time part: of distinct buckets, or of parameters.
  int64_t time_sums() const;

  // The entry of time_weights that number n of these belongs to.
  int64_t TimeWeight(int64_t n) const { return tables_.time == TimeMap::kBuckets ? bucket_[n] : n; }

 private:
  BiasTables tables_{};
  std::vector<float> position_, weights_;
  std::vector<int64_t> thresholds_;  // distinct, ascending
  std::vector<int64_t> bucket_;      // [d]: the bucket of a difference that reaches d of them; equal ones leave some empty
  std::unique_ptr<CellTable> cells_;
};

}  // namespace fusedrec
