// Invalid makes the status of a refusal. RequireIn and RequireSize check a number.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/host_device.h"

namespace fusedrec {

// An InvalidArgument of these words and numbers.
template <typename... Words>
absl::Status Invalid(const Words&... words) {
  return absl::InvalidArgumentError(absl::StrCat(words...));
}

// The remedy for a message of another rank that cannot be read.
constexpr char kEqualRanks[] = " All ranks must run the same model with the same tables and micro-batches.";

inline absl::Status RequireIn(const char* name, int64_t got, int64_t least, int64_t most, const char* remedy) {
  if (least <= got && got <= most) return absl::OkStatus();
  return Invalid(name, " must lie in [", least, ", ", most, "], got ", got, ". Remedy: ", remedy);
}

// The limit of positions in 32 bits.
inline absl::Status RequireSize(const char* name, int64_t size) {
  if (size <= kMostPositions) return absl::OkStatus();
  return Invalid(name, " must be at most ", kMostPositions, ", got ", size, ". Use smaller batches.");
}

}  // namespace fusedrec
