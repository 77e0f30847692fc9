// A file for what does not fit into memory: the rows of a table beyond its budget, the states that leave a cache.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace fusedrec {

// Opens a new file without a name in `folder`. It is gone when the process is, however that ends, and no other process
// finds it. `kind` is a word for the file's name, which exists for a moment.
absl::StatusOr<int> OpenScratchFile(const std::string& folder, const std::string& kind);

}  // namespace fusedrec
