#include "jagged_attention/cpu/prepared_bias.h"

#include <algorithm>

namespace fusedrec {

PreparedBias::PreparedBias(const RelativeBias& bias) {
  tables_.time = bias.time;
  tables_.asks = bias.asks.data();
  tables_.answers = bias.answers.data();
  if (!bias.position_weights.empty()) {
    position_.assign(bias.position_weights.rbegin(), bias.position_weights.rend());
    position_.resize(position_.size() + kPanel, 0.0f);
    tables_.position = position_.data();
    tables_.max_length = (static_cast<int64_t>(bias.position_weights.size()) + 1) / 2;
  }
  if (bias.time == TimeMap::kBuckets) {
    distinct_ = MakeDistinct(bias.thresholds);
    for (const int64_t bucket : distinct_.bucket) weights_.push_back(bias.time_weights[bucket]);
    cells_ = std::make_unique<CellTable>(distinct_.thresholds);
    tables_.weights = weights_.data();
    tables_.thresholds = distinct_.thresholds.data();
    tables_.num_thresholds = static_cast<int64_t>(distinct_.thresholds.size());
    tables_.cells = cells_->cells();
  } else {
    std::copy_n(bias.time_weights.begin(), NumTimeParameters(bias.time), tables_.parameters);
  }
}

int64_t PreparedBias::time_sums() const {
  switch (tables_.time) {
    case TimeMap::kNone: return 0;
    case TimeMap::kBuckets: return tables_.num_thresholds + 1;
    default: return 3;
  }
}

}  // namespace fusedrec
