// All update rules, and a rule by its name. Host code.
#pragma once

#include <map>
#include <sstream>
#include <string>
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

using RuleParameters = std::map<std::string, double>;  // by name

// Sets the parameters of a rule. A parameter that is not given keeps its default, which may be out of its range.
class ParameterReader {
 public:
  explicit ParameterReader(RuleParameters given) : given_(std::move(given)) {}

  void operator()(const char* name, float& member, Range range) {
    const auto at = given_.find(name);
    if (at != given_.end()) {
      member = static_cast<float>(at->second);
      given_.erase(at);
    }
    if (refusal_.empty() && !(member >= range.least && member <= range.most)) {
      std::ostringstream text;
      text << name << " must be finite and lie in [" << range.least << ", " << range.most << "], got " << member;
      refusal_ = text.str();
    }
  }
  void operator()(const char* name, bool& member) {
    float number = member;
    (*this)(name, number, Range{0, 1});
    member = number != 0;
  }
  // Why these are no parameters of the rule; empty: they are.
  std::string Refusal() const {
    return refusal_.empty() && !given_.empty() ? "it has no parameter " + given_.begin()->first : refusal_;
  }

 private:
  RuleParameters given_;  // those that no member has taken
  std::string refusal_;
};

// Makes the rule of this name from its parameters. Returns a refusal, or nothing.
inline std::string ReadRule(const std::string& name, const RuleParameters& parameters, AnyRule* rule) {
  std::string known, refusal;
  bool is_known = false;
  ForEachRule([&](auto r) {
    known += std::string(known.empty() ? "" : ", ") + r.kName;
    if (name != r.kName) return;
    is_known = true;
    ParameterReader reader(parameters);
    r.Parameters(reader);
    refusal = reader.Refusal();
    *rule = r;
  });
  if (!is_known) refusal = "rule must be one of " + known + ", got '" + name + "'";
  else if (!refusal.empty()) refusal = "rule " + name + ": " + refusal;
  return refusal.empty() ? refusal : refusal + ". Use a record of tf_fusedrec.optimizers.";
}

}  // namespace fusedrec
