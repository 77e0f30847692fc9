// A relative bias in the form that the tile engine works with: position weights in reverse, distinct thresholds, and cells
// that lead from a time difference to its bucket with few comparisons, exactly, from integers.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "jagged_attention/cpu/tile_engine.h"

namespace fusedrec {

class CellTable {
 public:
  // thresholds: distinct, ascending.
  explicit CellTable(absl::Span<const int64_t> thresholds) {
    for (const int64_t threshold : thresholds) {
      if (threshold < kNever) thresholds_.push_back(static_cast<int32_t>(std::max<int64_t>(threshold, 0)));
    }
    num_thresholds_ = static_cast<int64_t>(thresholds_.size());
    // The fewest cells of which each needs one comparison, if any number does.
    constexpr int kMostCellBits = 8;  // 2^8 cells in an octave: 32 KiB for all differences
    int cell_bits = 2;
    while ((probes_ = Fill(cell_bits)) > 1 && cell_bits < kMostCellBits) ++cell_bits;
    thresholds_.insert(thresholds_.end(), probes_ + 1, kNever);
  }

  BucketCells cells() const {
    return {begin_.data(), thresholds_.data(), static_cast<int32_t>(begin_.size()), shift_, probes_};
  }

 private:
  static constexpr int32_t kNever = std::numeric_limits<int32_t>::max();

  static float FloatOf(int32_t bits) {
    float number;
    std::memcpy(&number, &bits, sizeof(number));
    return number;
  }
  // Cells of 2^-mantissa_bits of an octave; returns the most comparisons that one of them needs.
  int32_t Fill(int mantissa_bits) {
    constexpr int kMantissaBits = 23;
    constexpr int32_t k2To31 = 0x4f000000, k2To32 = 0x4f800000;  // bits of these floats
    shift_ = kMantissaBits - mantissa_bits;
    const int32_t num_cells = (k2To31 >> shift_) + 1;
    begin_.assign(num_cells, 0);
    int32_t probes = 0;
    for (int32_t cell = 0; cell < num_cells; ++cell) {
      // (float)difference is rounded, so the borders move outwards by more than the error.
      const double low = FloatOf(cell << shift_) * (1.0 - 1e-7);
      const double high = FloatOf(cell + 1 == num_cells ? k2To32 : (cell + 1) << shift_) * (1.0 + 1e-7);
      const auto first = thresholds_.begin(), last = first + num_thresholds_;
      // Buckets of the smallest and of the largest difference that may be here.
      begin_[cell] = static_cast<int32_t>(
          std::partition_point(first, last, [&](int32_t threshold) { return threshold <= low; }) - first);
      const auto end = std::partition_point(first, last, [&](int32_t threshold) { return threshold <= high; }) - first;
      probes = std::max(probes, static_cast<int32_t>(end) - begin_[cell]);
    }
    return probes;
  }

  std::vector<int32_t> begin_;
  std::vector<int32_t> thresholds_;
  int64_t num_thresholds_;  // below INT32_MAX; larger ones are never reached
  int32_t shift_ = 0;
  int32_t probes_ = 0;
};

// Owns what its tables point to, but for the times.
class PreparedBias {
 public:
  explicit PreparedBias(const RelativeBias& bias) {
    tables_.time = bias.time;
    tables_.asks = bias.asks;
    tables_.answers = bias.answers;
    if (bias.position_weights != nullptr) {
      position_.assign(2 * bias.max_length - 1 + kPanel, 0.0f);
      std::reverse_copy(bias.position_weights, bias.position_weights + 2 * bias.max_length - 1, position_.begin());
      tables_.position = position_.data() + bias.max_length - 1;
    }
    if (bias.time != TimeMap::kBuckets) {
      std::copy_n(bias.time_weights, NumTimeWeights(bias), tables_.parameters);
      return;
    }
    for (int32_t g = 0; g < bias.num_thresholds; ++g) {
      if (!thresholds_.empty() && thresholds_.back() == bias.thresholds[g]) continue;
      bucket_.push_back(g);
      thresholds_.push_back(bias.thresholds[g]);
    }
    bucket_.push_back(bias.num_thresholds);
    for (const int64_t bucket : bucket_) weights_.push_back(bias.time_weights[bucket]);
    cells_ = std::make_unique<CellTable>(thresholds_);
    tables_.weights = weights_.data();
    tables_.thresholds = thresholds_.data();
    tables_.num_thresholds = static_cast<int32_t>(thresholds_.size());
    tables_.cells = cells_->cells();
  }
  PreparedBias(const PreparedBias&) = delete;
  PreparedBias& operator=(const PreparedBias&) = delete;

  const BiasTables& tables() const { return tables_; }

  // Numbers that a unit sums up for the time part: of distinct buckets, or of parameters.
  int64_t time_sums() const {
    if (tables_.time == TimeMap::kNone) return 0;
    return tables_.time == TimeMap::kBuckets ? tables_.num_thresholds + 1 : 3;
  }
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
