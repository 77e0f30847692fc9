// Runs the test that the argument names.
#include "check.h"

int main(int count, char** arguments) {
  const auto& tests = fusedrec::Tests();
  const auto test = count == 2 ? tests.find(arguments[1]) : tests.end();
  if (test != tests.end()) {
    test->second();
    return 0;
  }
  std::fprintf(stderr, "error: got %s; name one test:\n", count == 2 ? arguments[1] : "no name");
  for (const auto& [name, body] : tests) std::fprintf(stderr, "  %s\n", name.c_str());
  return 2;
}
