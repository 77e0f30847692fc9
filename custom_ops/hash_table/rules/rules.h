// All update rules, and a rule by its name. Host code.
#pragma once

#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "hash_table/rules/adagrad.h"
#include "hash_table/rules/adam.h"
#include "hash_table/rules/ftrl.h"
#include "hash_table/rules/rmsprop.h"
#include "hash_table/rules/rowwise_adam.h"
#include "hash_table/rules/sgd.h"

#define FUSEDREC_RULES(DO) DO(Sgd) DO(Momentum) DO(Adagrad) DO(RowwiseAdagrad) DO(Rmsprop) DO(Adam) DO(RowwiseAdam) DO(Ftrl)

namespace fusedrec {

using AnyRule = std::variant<Sgd, Momentum, Adagrad, RowwiseAdagrad, Rmsprop, Adam, RowwiseAdam, Ftrl>;

// Calls do_(R()) for each rule.
template <class Do>
void ForEachRule(Do&& do_) {
#define FUSEDREC_DO(R) do_(R());
  FUSEDREC_RULES(FUSEDREC_DO)
#undef FUSEDREC_DO
}

// Optimizer state of a row: numbers per column, and per row.
struct SlotCounts {
  int wide, scalar;
};

inline SlotCounts SlotsOf(const AnyRule& rule) {
  return std::visit([](const auto& r) { return SlotCounts{r.kSlots, r.kRowSlots}; }, rule);
}

// Value of slot k of a row that was never trained; row slots follow the others.
inline float SlotStart(const AnyRule& rule, int k) {
  return std::visit([k](const auto& r) { return r.SlotStart(k); }, rule);
}

// The parameters of a rule in the order of Parameters.
class ParameterReader {
 public:
  ParameterReader(const float* numbers, int64_t count) : numbers_(numbers), count_(count) {}

  void operator()(const char* name, float& member, Range range) {
    if (read_ < count_) member = numbers_[read_];
    if (refusal_.empty() && read_ < count_ && !(member >= range.least && member <= range.most)) {
      std::ostringstream text;
      text << name << " must be finite and lie in [" << range.least << ", " << range.most << "], got " << member;
      refusal_ = text.str();
    }
    ++read_;
  }
  void operator()(const char* name, bool& member) {
    float number = member;
    (*this)(name, number, Range{0, 1});
    member = number != 0;
  }
  // Why the numbers are no parameters of the rule; empty: they are.
  std::string Refusal() const {
    if (read_ == count_) return refusal_;
    return "the number of parameters must be " + std::to_string(read_) + ", got " + std::to_string(count_);
  }

 private:
  const float* numbers_;
  int64_t count_, read_ = 0;
  std::string refusal_;
};

// Makes the rule of this name from its parameters. Returns a refusal, or nothing.
inline std::string ReadRule(const std::string& name, const float* parameters, int64_t count, AnyRule* rule) {
  std::string known, refusal;
  bool is_known = false;
  ForEachRule([&](auto r) {
    known += std::string(known.empty() ? "" : ", ") + r.kName;
    if (name != r.kName) return;
    is_known = true;
    ParameterReader reader(parameters, count);
    r.Parameters(reader);
    refusal = reader.Refusal();
    *rule = r;
  });
  if (!is_known) refusal = "rule must be one of " + known + ", got '" + name + "'";
  else if (!refusal.empty()) refusal = "rule " + name + ": " + refusal;
  return refusal.empty() ? refusal : refusal + ". Use a record of tf_fusedrec.optimizers.";
}

}  // namespace fusedrec
