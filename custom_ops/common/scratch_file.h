// A file for what does not fit into memory: the rows of a table beyond its budget, the states that leave a cache.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/limits.h"

namespace fusedrec {

// Opens a new file without a name in `folder`. It is gone when the process is, however that ends, and no other process
// finds it. `kind` is a word for the file's name, which exists for a moment.
inline absl::StatusOr<int> OpenScratchFile(const std::string& folder, const std::string& kind) {
  const std::string path = absl::StrCat(folder, "/fusedrec-", kind, "-XXXXXX");
  std::vector<char> name(path.begin(), path.end());
  name.push_back('\0');
  const int file = mkstemp(name.data());
  if (file < 0) {
    return Invalid(
        "tier_folder '", folder, "' must be a folder that can be written, ", "got: ", std::strerror(errno), ".");
  }
  unlink(name.data());
  return file;
}

}  // namespace fusedrec
