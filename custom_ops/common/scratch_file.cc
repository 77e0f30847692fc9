#include "common/scratch_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"

namespace fusedrec {

absl::StatusOr<int> OpenScratchFile(const std::string& folder, const std::string& kind) {
  const std::string path = absl::StrCat(folder, "/fusedrec-", kind, "-XXXXXX");
  std::vector<char> name(path.begin(), path.end());
  name.push_back('\0');
  const int file = mkstemp(name.data());
  if (file < 0) {
    return absl::InvalidArgumentError(absl::StrCat("tier_folder '", folder, "' must be a folder that can be written, ",
                                                   "got: ", std::strerror(errno), "."));
  }
  unlink(name.data());
  return file;
}

}  // namespace fusedrec
