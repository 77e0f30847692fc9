// A relative bias in the form that the tile engine works with.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "jagged_attention/cpu/bucket_cells.h"
#include "jagged_attention/cpu/jagged_attention.h"
#include "jagged_attention/cpu/tile_engine.h"

namespace fusedrec {

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
  int64_t TimeWeight(int64_t n) const { return tables_.time == TimeMap::kBuckets ? distinct_.bucket[n] : n; }

 private:
  BiasTables tables_{};
  std::vector<float> position_, weights_;
  DistinctBuckets distinct_;
  std::unique_ptr<CellTable> cells_;
};

}  // namespace fusedrec
