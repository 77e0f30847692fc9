#include "initial_rows/initial_rows.h"

#include <algorithm>

namespace fusedrec {

Distribution DistributionOf(const std::string& name) {
  return name == "constant"  ? Distribution::kConstant
         : name == "uniform" ? Distribution::kUniform
         : name == "normal"  ? Distribution::kNormal
                             : Distribution::kTruncatedNormal;
}

void InitialRow(Distribution distribution, double a, double b, uint64_t seed, int64_t id, absl::Span<float> row) {
  if (distribution == Distribution::kConstant) {
    std::fill(row.begin(), row.end(), static_cast<float>(a));
    return;
  }
  Four bits{};
  for (size_t d = 0; d < row.size(); ++d) {
    if (d % 4 == 0) bits = InitialBits(seed, id, static_cast<uint32_t>(d / 4));
    row[d] = InitialNumber(distribution, a, b, bits.number[d % 4]);
  }
}

}  // namespace fusedrec
