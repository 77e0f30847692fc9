// The largest sizes that ops accept, and the Status for larger sizes. There is no memory for larger sizes, and their sums
// overflow.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/host_device.h"

namespace fusedrec {

constexpr int64_t kMostColumns = int64_t{1} << 20;          // of a row
constexpr int64_t kMostCount = int64_t{1} << 48;            // of the counts of a table: rows, bytes, lookups
constexpr int64_t kMostVersion = (int64_t{1} << 32) - 1;    // of a table; table_limits.h has that of its clock

inline absl::Status RequireIn(const char* name, int64_t got, int64_t least, int64_t most, const char* remedy) {
  if (least <= got && got <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " must lie in [", least, ", ", most, "], got ", got, ". Remedy: ", remedy));
}

// The limit of positions in 32 bits.
inline absl::Status RequireSize(const char* name, int64_t size) {
  if (size <= kMostPositions) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " must be at most ", kMostPositions, ", got ", size, ". Use smaller batches."));
}

}  // namespace fusedrec
