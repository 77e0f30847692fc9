#include "jagged_attention/cpu/prepared_bias.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace fusedrec {
namespace {

constexpr int kMantissaBits = 23;
constexpr int kMostCellBits = 8;  // 2^8 cells in an octave: 32 KiB for all differences

float FloatOf(int32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

int32_t BitsOf(float number) {
  int32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}

}  // namespace

CellTable::CellTable(absl::Span<const int64_t> thresholds) {
  constexpr int64_t kNever = std::numeric_limits<int32_t>::max();
  for (const int64_t threshold : thresholds) {
    if (threshold < kNever) thresholds_.push_back(static_cast<int32_t>(std::max<int64_t>(threshold, 0)));
  }
  num_thresholds_ = static_cast<int64_t>(thresholds_.size());
  // The fewest cells of which each needs one comparison, if any number does.
  int cell_bits = 2;
  while ((probes_ = Fill(cell_bits)) > 1 && cell_bits < kMostCellBits) ++cell_bits;
  thresholds_.insert(thresholds_.end(), probes_ + 1, std::numeric_limits<int32_t>::max());
}

int32_t CellTable::Fill(int mantissa_bits) {
  shift_ = kMantissaBits - mantissa_bits;
  const int32_t num_cells = (BitsOf(2147483648.0f) >> shift_) + 1;
  begin_.assign(num_cells, 0);
  int32_t probes = 0;
  for (int32_t cell = 0; cell < num_cells; ++cell) {
    // (float)difference is rounded, so the borders move outwards by more than the error.
    const double low = FloatOf(cell << shift_) * (1.0 - 1e-7);
    const double high = FloatOf(cell + 1 == num_cells ? BitsOf(4294967296.0f) : (cell + 1) << shift_) * (1.0 + 1e-7);
    const auto first = thresholds_.begin(), last = first + num_thresholds_;
    // Buckets of the smallest and of the largest difference that may be here.
    begin_[cell] = static_cast<int32_t>(
        std::partition_point(first, last, [&](int32_t threshold) { return threshold <= low; }) - first);
    const auto end = std::partition_point(first, last, [&](int32_t threshold) { return threshold <= high; }) - first;
    probes = std::max(probes, static_cast<int32_t>(end) - begin_[cell]);
  }
  return probes;
}

BucketCells CellTable::cells() const {
  return {begin_.data(), thresholds_.data(), static_cast<int32_t>(begin_.size()), shift_, probes_};
}

PreparedBias::PreparedBias(const RelativeBias& bias) {
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

int64_t PreparedBias::time_sums() const {
  switch (tables_.time) {
    case TimeMap::kNone: return 0;
    case TimeMap::kBuckets: return tables_.num_thresholds + 1;
    default: return 3;
  }
}

}  // namespace fusedrec
