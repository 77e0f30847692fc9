// FUSEDREC_TRY(call) makes the enclosing function return the call's result, unless that is 0 or an OK Status.
#pragma once

#include <type_traits>

namespace fusedrec {

template <typename Answer>
bool IsOk(const Answer& answer) {
  if constexpr (std::is_class_v<Answer>) {
    return answer.ok();
  } else {
    return answer == 0;
  }
}

}  // namespace fusedrec

#define FUSEDREC_TRY(...)                                         \
  do {                                                            \
    const auto fusedrec_answer = (__VA_ARGS__);                   \
    if (!fusedrec::IsOk(fusedrec_answer)) return fusedrec_answer; \
  } while (false)
