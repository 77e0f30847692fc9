// Tests of this folder, and their checks. The first failure prints its place and values, and ends the program with 1.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"

// TEST(name) { ... } in name_test.cc is what main.cc runs by that name.
#define TEST(name)                                                                                                \
  static void Test_##name();                                                                                      \
  [[maybe_unused]] static const bool is_test_##name = ::fusedrec::Tests().emplace(#name, &Test_##name).second; \
  static void Test_##name()

// `...`: Arguments of absl::StrCat that explain a failure, a string literal first.
#define CHECK(condition, ...)                                                                      \
  do {                                                                                             \
    if (!(condition)) ::fusedrec::Fail(__FILE__, __LINE__, #condition, absl::StrCat("" __VA_ARGS__)); \
  } while (false)

#define CHECK_EQ(got, wanted, ...)                                                                   \
  do {                                                                                               \
    const auto got_value = (got);                                                                    \
    const auto wanted_value = (wanted);                                                              \
    if (!(got_value == wanted_value)) {                                                              \
      ::fusedrec::Fail(__FILE__, __LINE__, #got " == " #wanted,                                      \
                       absl::StrCat("got ", got_value, ", wanted ", wanted_value, ". " __VA_ARGS__)); \
    }                                                                                                \
  } while (false)

// Checks an absl::Status.
#define CHECK_OK(expression)                                                                \
  do {                                                                                      \
    const auto outcome = (expression);                                                      \
    if (!outcome.ok()) ::fusedrec::Fail(__FILE__, __LINE__, #expression, outcome.ToString()); \
  } while (false)

namespace fusedrec {

inline std::map<std::string, void (*)()>& Tests() {
  static std::map<std::string, void (*)()> tests;
  return tests;
}

[[noreturn]] inline void Fail(const char* file, int line, const char* condition, const std::string& words) {
  std::fprintf(stderr, "%s:%d: not so: %s; %s\n", file, line, condition, words.c_str());
  std::fflush(stderr);
  std::_Exit(1);  // other threads may still run
}

}  // namespace fusedrec
