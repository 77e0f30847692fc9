// The Status for sizes that are too large.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/host_device.h"

namespace fusedrec {

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
