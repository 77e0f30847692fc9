// FUSEDREC_TRY(call) returns from the function around it what a call answers, unless all is well: 0, or a Status that is ok.
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

#define FUSEDREC_TRY(call)                                        \
  do {                                                            \
    const auto fusedrec_answer = (call);                          \
    if (!fusedrec::IsOk(fusedrec_answer)) return fusedrec_answer; \
  } while (false)
