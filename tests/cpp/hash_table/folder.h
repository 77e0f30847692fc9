// A folder for the files of a test.
#ifndef FUSEDREC_TESTS_CPP_FOLDER_H_
#define FUSEDREC_TESTS_CPP_FOLDER_H_

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

#endif  // FUSEDREC_TESTS_CPP_FOLDER_H_
