// A folder for the files of a test.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "check.h"

namespace fusedrec {

// A folder that goes when the program does.
class Folder {
 public:
  Folder() {
    const char* parent = std::getenv("TMPDIR");
    name_ = absl::StrCat(parent == nullptr ? P_tmpdir : parent, "/fusedrec-test-XXXXXX");
    CHECK(mkdtemp(name_.data()) != nullptr);
  }
  ~Folder() { rmdir(name_.c_str()); }  // the table's file has no name
  const std::string& name() const { return name_; }

 private:
  std::string name_;
};

}  // namespace fusedrec
