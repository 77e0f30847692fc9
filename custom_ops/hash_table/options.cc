#include "hash_table/options.h"

namespace fusedrec {
namespace {

int PlaceOf(const std::string& name) {
  for (const auto& [place, number] : kPlaces) {
    if (name == place) return number;
  }
  return 0;
}

std::string ParametersOfRules() {
  std::string all;
  ForEachRule([&all](auto rule) {
    std::string names;
    rule.Parameters(
        [&names](const char* name, auto&&...) { names += std::string(names.empty() ? "\"" : ", \"") + name + '"'; });
    all += std::string(all.empty() ? "{\"" : ", \"") + rule.kName + "\": [" + names + "]";
  });
  return all + "}";
}

std::string Schema() {
  table_options::Table defaults;
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out << std::boolalpha;
  const char* const scopes[] = {"table", "group", "sum"};
  for (const auto& field : table_options::FieldsOf(&defaults)) {
    out << (out.tellp() == 0 ? "{" : ", ") << '"' << field.path << "\": {\"scope\": \""
        << scopes[static_cast<int>(field.scope)] << "\", \"lacks\": [";
    const char* comma = "";
    for (const auto& [place, number] : kPlaces) {
      if ((field.lacks & number) == 0) continue;
      out << comma << '"' << place << '"';
      comma = ", ";
    }
    out << "], \"choices\": [";
    comma = "";
    for (const char* choice : field.choices) {
      out << comma << '"' << choice << '"';
      comma = ", ";
    }
    out << "]";
    if (std::holds_alternative<int64_t*>(field.member)) {
      out << ", \"least\": " << field.least << ", \"most\": " << field.most;
    }
    if (field.path == std::string("rule")) out << ", \"parameters\": " << ParametersOfRules();
    const table_options::Value value = field.value();
    out << ", \"default\": " << value << (table_options::IsText(value) ? "\"}" : "}");
  }
  out << '}';
  return out.str();
}

}  // namespace
}  // namespace fusedrec

#define FUSEDREC_EXPORT extern "C" __attribute__((visibility("default")))

// The fields of a table's text as a JSON object by path: scope, lacks (places), choices, least and most,
// default; that of "rule" has the parameters of each rule, "rule.epsilon" and the like in a table's text.
FUSEDREC_EXPORT const char* fusedrec_table_schema() {
  static const std::string schema = fusedrec::Schema();
  return schema.c_str();
}

// Why tables with these texts cannot be a group at a place, "CPU" or "device"; "" where they can. Ends with the next call
// of this thread.
FUSEDREC_EXPORT const char* fusedrec_check_table(const char* const* texts, int64_t count, const char* place) {
  thread_local std::string refusal;
  fusedrec::TableSpec spec;
  refusal = fusedrec::ReadTables({texts, texts + count}, fusedrec::PlaceOf(place), &spec, true);
  return refusal.c_str();
}
