// The options of a table, as one flat JSON object from Python to the kernels:
//   {"name": "item", "dim": 8, "seed": -5, "limits.ttl": 30, "storage.dtype": "bfloat16", ...}
//
// FieldsOf lists all of them once: the reader, the schema that Python compares with its records, the comparison of tables
// in a group and the refusals of a place walk that list. Fields that a text leaves out have their default. Standard library
// alone: libfusedrec_cuda.so reads the texts, too.
#pragma once

#include <locale>
#include <vector>

#include "common/host_device.h"
#include "hash_table/rules/rules.h"
#include "hash_table/table_limits.h"

namespace fusedrec {

enum class Scope { kTable, kGroup, kSum };  // of one table; equal in a group; the group has the sum

// Where the rows of a table are; kAveraged, wherever they are: replicas of the table are averaged.
enum Place { kOnCpu = 1, kOnDevice = 2, kInHostRows = 4, kAveraged = 8 };
constexpr std::pair<const char*, Place> kPlaces[] = {
    {"CPU", kOnCpu}, {"device", kOnDevice}, {"host_rows", kInHostRows}, {"averaged", kAveraged}};

// The tables of a group, which one resource holds; the same on all ranks.
struct TableSpec : TableOptions {
  AnyRule rule;                    // of all of them
  std::vector<std::string> texts;  // of the segments, of which the rest is made
  std::vector<uint64_t> seeds;     // one per segment
  std::vector<Limits> limits;      // of the segments; empty: no segment has one
  std::vector<int64_t> ttl_minutes;  // of the segments, as limits: minutes without a lookup after which a row leaves
  std::vector<std::string> names;  // of the segments, for messages; they may be empty
  int64_t memory_budget = 0;       // > 0: bytes of rows in memory; rows beyond are kept in a file
  std::string tier_folder;         // of that file
  bool host_rows = false;          // device tables only: rows in host memory, the rows of two batches on the device
  int64_t hot_rows = 0;            // with host_rows: further rows on the device, the most frequent ones

  std::string NameOf(int64_t segment) const {
    const bool named = !names.empty() && !names[segment].empty();
    return named ? "table '" + names[segment] + "'" : "segment " + std::to_string(segment);
  }
};

constexpr int64_t kMostMinutes = int64_t{1} << 31;

namespace table_options {

// A value as the text of a table has it, but for a text, which is decoded after its first quotation mark.
using Value = std::string;

using Names = std::vector<const char*>;  // by the number of an enumerator

struct Table : TableOptions {
  std::string name, folder, rule = "sgd";
  RuleParameters parameters;  // of the rule: "rule.epsilon" in the text
  AnyRule made_rule;
  int dtype = 0, initial_dtype = 0, eviction = 0, distribution = 0, unknown = 0;  // numbers in the lists of FieldsOf
  int64_t columns = 0, seed = 0, memory_budget = 0, hot_rows = 0, ttl_minutes = 0;
  bool host_rows = false;
  Limits limits;

  bool is_mixed() const { return dtype == 3; }
  bool is_int8() const { return dtype == 4; }
  Storage storage_of_rows() const {
    return is_mixed() ? Storage::kFloat32 : is_int8() ? Storage::kInt8 : static_cast<Storage>(dtype);
  }
};

struct Field {
  const char* path;
  std::variant<std::string*, bool*, int64_t*, double*, int*> member;
  Scope scope = Scope::kGroup;
  int lacks = 0;                         // the places where it must have its default
  int64_t least = 0, most = kMostCount;  // of an integer
  Names choices{};                       // of an int

  Value value() const {
    if (auto* const* text = std::get_if<std::string*>(&member)) return '"' + **text;
    if (auto* const* choice = std::get_if<int*>(&member)) return std::string("\"") + choices[**choice];
    std::ostringstream text;
    text.imbue(std::locale::classic());
    text.precision(17);
    std::visit([&](auto* at) { text << std::boolalpha << *at; }, member);
    return text.str();
  }
};

inline std::vector<Field> FieldsOf(Table* t) {
  Limits* const limits = &t->limits;
  return {
      {"name", &t->name, Scope::kTable},
      {"dim", &t->columns, Scope::kGroup, 0, 1, kMostColumns},
      {"seed", &t->seed, Scope::kTable, 0, INT64_MIN, INT64_MAX},
      {"initializer", &t->distribution, Scope::kGroup, 0, 0, 0, {"constant", "uniform", "normal", "truncated_normal"}},
      {"initializer.a", &t->a},
      {"initializer.b", &t->b},
      {"unknown", &t->unknown, Scope::kGroup, 0, 0, 0, {"initial", "zeros"}},
      {"storage.dtype", &t->dtype, Scope::kGroup, 0, 0, 0, {"float32", "bfloat16", "float16", "mixed", "int8"}},
      {"storage.initial_dtype", &t->initial_dtype, Scope::kGroup, 0, 0, 0, {"float32", "bfloat16", "float16"}},
      {"storage.stochastic_rounding", &t->stochastic_rounding},
      {"storage.hot_after", &t->hot_after, Scope::kGroup, kInHostRows | kAveraged},
      {"limits.max_rows_per_rank", &limits->max_rows, Scope::kTable},
      {"limits.eviction", &t->eviction, Scope::kTable, 0, 0, 0, {"none", "lru", "lfu"}},
      {"limits.exact_eviction", &limits->exact_eviction, Scope::kTable},
      {"limits.ttl", &limits->ttl, Scope::kTable},
      {"limits.ttl_minutes", &t->ttl_minutes, Scope::kTable, kOnDevice | kInHostRows | kAveraged, 0, kMostMinutes},
      {"limits.admission_count", &limits->admission_count, Scope::kTable, kInHostRows | kAveraged, 1},
      {"limits.max_candidates_per_rank", &limits->max_candidates, Scope::kTable},
      {"limits.frequency_decay_steps", &limits->frequency_decay_steps, Scope::kTable, kAveraged},
      {"tier.memory_budget_per_rank", &t->memory_budget, Scope::kSum, kOnDevice},
      {"tier.folder", &t->folder, Scope::kGroup, kOnDevice},
      {"tier.host_rows", &t->host_rows},
      {"tier.hot_rows_per_rank", &t->hot_rows, Scope::kSum, kOnDevice, 0, kMostPositions},
      {"record_tombstones", &t->record_tombstones},
      {"rule", &t->rule},
      {"averaged", &t->averaged, Scope::kGroup, kInHostRows},
  };
}

inline bool IsText(const Value& value) { return value[0] == '"'; }

inline std::string TextOf(const Value& value) {
  if (IsText(value)) return "'" + value.substr(1) + "'";
  return value == "true" ? "True" : value == "false" ? "False" : value;
}

// Returns whether a value is a number of this type, in the locale of C.
template <typename Number>
bool IsNumber(const Value& value, Number* number) {
  std::istringstream text(value);
  text.imbue(std::locale::classic());
  return text >> *number && text.peek() == std::istringstream::traits_type::eof();
}

// A reader of {"key": value, ...} with texts, integers, numbers, true and false as values.
class Json {
 public:
  explicit Json(const std::string& text) : text_(text) {}

  // Returns what is wrong with the text, or "".
  std::string Read(std::map<std::string, Value>* values) {
    if (!Take('{')) return Wrong("'{'");
    for (bool first = true; !Take('}'); first = false) {
      std::string key;
      Value value;
      if (!first && !Take(',')) return Wrong("',' or '}'");
      if (!ReadText(&key) || !Take(':')) return Wrong("\"name\":");
      if (!ReadValue(&value)) return Wrong("a text, a number, true or false");
      if (!values->emplace(key, value).second) return key + " must come once, got it twice";
    }
    return Skip() ? Wrong("its end") : "";
  }

 private:
  bool Skip() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
    return at_ < text_.size();
  }
  bool Take(char wanted) {
    if (!Skip() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }
  bool ReadText(std::string* read) {
    static const std::map<char, char> kEscapes = {{'"', '"'},  {'\\', '\\'}, {'/', '/'},  {'b', '\b'},
                                                  {'f', '\f'}, {'n', '\n'},  {'r', '\r'}, {'t', '\t'}};
    if (!Take('"')) return false;
    for (; at_ < text_.size(); ++at_) {
      if (text_[at_] == '"') return ++at_, true;
      if (text_[at_] != '\\') {
        *read += text_[at_];
        continue;
      }
      if (++at_ == text_.size()) return false;
      const auto escape = kEscapes.find(text_[at_]);
      if (escape != kEscapes.end()) {
        *read += escape->second;
      } else {  // \u00XX: Python escapes control characters alone, and writes others in UTF-8
        const std::string hex = text_.substr(at_, 5);
        if (hex.size() != 5 || hex.compare(0, 3, "u00") != 0 || !std::isxdigit(hex[3]) || !std::isxdigit(hex[4])) return false;
        *read += static_cast<char>(std::stoi(hex.substr(3), nullptr, 16));
        at_ += 4;
      }
    }
    return false;
  }
  bool ReadValue(Value* read) {
    if (!Skip()) return false;
    if (text_[at_] == '"') return ReadText(&read->assign("\""));
    const size_t end = std::min(text_.find_first_of(",} \t\r\n", at_), text_.size());
    *read = text_.substr(std::exchange(at_, end), end - at_);
    double number;
    return *read == "true" || *read == "false" || IsNumber(*read, &number);
  }
  std::string Wrong(const char* wanted) const {
    return "the text of a table must be a flat JSON object, got no " + std::string(wanted) + " at byte " +
           std::to_string(at_) + " of " + text_;
  }

  const std::string& text_;
  size_t at_ = 0;
};

// Returns "limits.ttl of table 'item'".
inline std::string At(const Field& field, const Table& table) {
  return std::string(field.path) + " of table '" + table.name + "'";
}

// Sets the member of a field. Returns a refusal, or "".
inline std::string Set(const Field& field, const Value& value, const Table& table) {
  const auto refuse = [&](const std::string& wanted) {
    return At(field, table) + " must be " + wanted + ", got " + TextOf(value) + ".";
  };
  if (auto* const* text = std::get_if<std::string*>(&field.member)) {
    if (!IsText(value)) return refuse("a text");
    **text = value.substr(1);
  } else if (auto* const* choice = std::get_if<int*>(&field.member)) {
    std::string names;
    for (size_t i = 0; i < field.choices.size(); ++i) {
      names += (names.empty() ? "'" : ", '") + std::string(field.choices[i]) + "'";
      if (value == std::string("\"") + field.choices[i]) return **choice = static_cast<int>(i), "";
    }
    return refuse("one of " + names);
  } else if (auto* const* flag = std::get_if<bool*>(&field.member)) {
    if (value != "true" && value != "false") return refuse("True or False");
    **flag = value == "true";
  } else if (auto* const* integer = std::get_if<int64_t*>(&field.member)) {
    int64_t number;
    if (!IsNumber(value, &number) || number < field.least || number > field.most) {
      return refuse("an int in [" + std::to_string(field.least) + ", " + std::to_string(field.most) + "]");
    }
    **integer = number;
  } else {
    double number;
    if (!IsNumber(value, &number)) return refuse("a finite number");
    *std::get<double*>(field.member) = static_cast<float>(number);  // kernels take floats
  }
  return "";
}

// Returns why options of one table do not go together, or "". useful: whether options without an effect are refused, too.
inline std::string CheckTogether(Table* t, bool useful) {
  const Eviction eviction = static_cast<Eviction>(t->eviction);
  const struct {
    bool wrong;
    const char *first, *second, *what;  // options, and the refusal
  } rules[] = {
      {t->is_mixed() != (t->hot_after > 0), "storage.hot_after", "storage.dtype",
       "a number > 0 and 'mixed' go together. Use both, or neither"},
      {t->memory_budget > 0 && t->folder.empty(), "tier.memory_budget_per_rank", "tier.folder",
       "a budget needs a folder for the rows beyond it. Use both, or neither"},
      {t->memory_budget > 0 && t->is_mixed(), "tier.memory_budget_per_rank", "storage.dtype",
       "a budget does not work with 'mixed'. Use another dtype"},
      {t->initial_dtype != 0 && !t->is_int8(), "storage.initial_dtype", "storage.dtype",
       "other initial rows have the dtype of all rows. Use 'int8', or leave it out"},
      {t->averaged && t->is_int8(), "averaged", "storage.dtype", "nothing trains rows in int8. Use another dtype"},
      {useful && t->memory_budget == 0 && !t->folder.empty(), "tier.memory_budget_per_rank", "tier.folder",
       "a folder needs a budget. Use both, or neither"},
      {useful && t->stochastic_rounding && t->dtype == 0, "storage.stochastic_rounding", "storage.dtype",
       "it needs a 16-bit dtype. Use 'bfloat16' or 'float16'"},
      {useful && t->hot_rows > 0 && !t->host_rows, "tier.hot_rows_per_rank", "tier.host_rows",
       "other tables have no rows in host memory for a GPU. Use host_rows=True, or leave hot_rows_per_rank 0"},
      {useful && eviction != Eviction::kNone && t->limits.max_rows == 0, "limits.eviction", "limits.max_rows_per_rank",
       "a policy needs max_rows_per_rank > 0. Use both, or neither"},
      {useful && t->limits.frequency_decay_steps > 0 && !t->is_mixed() && eviction != Eviction::kLfu,
       "limits.frequency_decay_steps", "limits.eviction",
       "only eviction 'lfu' and storage.dtype 'mixed' compare counts. Use one of them, or leave frequency_decay_steps 0"},
      {useful && t->limits.exact_eviction && eviction == Eviction::kNone, "limits.exact_eviction", "limits.eviction",
       "no rows are evicted. Use 'lru' or 'lfu', or leave exact_eviction False"},
  };
  const std::vector<Field> fields = FieldsOf(t);
  const auto text_of = [&](const std::string& path) {
    for (const Field& field : fields) {
      if (path == field.path) return TextOf(field.value());
    }
    return std::string();
  };
  for (const auto& rule : rules) {
    if (!rule.wrong) continue;
    return std::string(rule.first) + " of table '" + t->name + "' is " + text_of(rule.first) + " with " + rule.second + ' ' +
           text_of(rule.second) + ": " + rule.what + ".";
  }
  return "";
}

// Returns which option a table must not have at a place, or "".
inline std::string CheckPlace(Table* table, int place, bool useful) {
  if (place == kOnDevice && table->host_rows) place = kInHostRows;
  Table defaults;
  if (place != kOnCpu && table->is_int8()) {
    return "storage.dtype of table '" + table->name + "' is 'int8', which a GPU does not read. Use a table under tf.device('/CPU:0').";
  }
  const std::vector<Field> got = FieldsOf(table), wanted = FieldsOf(&defaults);
  for (size_t f = 0; f < got.size(); ++f) {
    const bool lacks = (got[f].lacks & place) != 0;
    if (!(lacks || (useful && table->averaged && (got[f].lacks & kAveraged) != 0)) || got[f].value() == wanted[f].value()) continue;
    const std::string found = At(got[f], *table) + " is " + TextOf(got[f].value()) + ", and must be " + TextOf(wanted[f].value());
    if (lacks) {
      return found + " on a GPU" + (place == kInHostRows ? " with host_rows" : "") +
             ". Use a table under tf.device('/CPU:0'), whose memory has all options, or leave this one out.";
    }
    return found + " where replicas are averaged (rule 'weight_sync'): it counts lookups of all ranks, and each group sees its "
                   "own. Use Topology(rule='gradient_sync').";
  }
  return "";
}

inline std::string Read(const std::string& text, Table* table) {
  std::map<std::string, Value> values;
  const std::string wrong = Json(text).Read(&values);
  if (!wrong.empty()) return wrong + ".";
  for (const Field& field : FieldsOf(table)) {
    const auto given = values.find(field.path);
    if (given == values.end()) {
      if (field.path == std::string("dim")) return "the text of a table must have dim, got " + text + ".";
      continue;
    }
    const std::string refused = Set(field, given->second, *table);
    if (!refused.empty()) return refused;
    values.erase(given);
  }
  const std::string of_rule = "rule.";
  for (const auto& [path, value] : values) {
    if (path.compare(0, of_rule.size(), of_rule) != 0) {
      return "a table has no option " + path + ", got it for table '" + table->name + "'.";
    }
    const Value number = value == "true" ? "1" : value == "false" ? "0" : value;
    if (!IsNumber(number, &table->parameters[path.substr(of_rule.size())])) {
      return path + " of table '" + table->name + "' must be a number, got " + TextOf(value) + ".";
    }
  }
  return ReadRule(table->rule, table->parameters, &table->made_rule);
}

}  // namespace table_options

// Reads the tables of a group. Returns a refusal, or "".
//   place   kOnCpu, or kOnDevice also with host_rows
//   useful  whether options that a user cannot mean are refused, too: an op takes them
inline std::string ReadTables(const std::vector<std::string>& texts, int place, TableSpec* spec, bool useful = false) {
  using namespace table_options;  // NOLINT
  if (texts.empty() || static_cast<int64_t>(texts.size()) > kMostSegments) {
    return "tables must be 1 to " + std::to_string(kMostSegments) + ", got " + std::to_string(texts.size()) + ".";
  }
  Table first;
  for (const std::string& text : texts) {
    Table table;
    std::string refused = Read(text, &table);
    if (refused.empty()) refused = CheckTogether(&table, useful);
    if (refused.empty()) refused = CheckPlace(&table, place, useful);
    if (!refused.empty()) return refused;
    table.dim = static_cast<int>(table.columns);
    table.storage = table.storage_of_rows();
    table.initial_storage = static_cast<Storage>(table.initial_dtype);
    table.limits.eviction = static_cast<Eviction>(table.eviction);
    table.TableOptions::distribution = static_cast<Distribution>(table.distribution);
    table.unknown_zeros = table.unknown == 1;
    if (spec->texts.empty()) {
      first = table;
      static_cast<TableOptions&>(*spec) = table;
      spec->rule = table.made_rule;
      spec->tier_folder = table.folder;
      spec->host_rows = table.host_rows;
    }
    const std::vector<Field> of_first = FieldsOf(&first), of_this = FieldsOf(&table);
    for (size_t f = 0; f < of_this.size(); ++f) {
      if (of_this[f].scope == Scope::kGroup && of_this[f].value() != of_first[f].value()) {
        return At(of_this[f], table) + " must be that of the other tables of its group, " + TextOf(of_first[f].value()) +
               ", got " + TextOf(of_this[f].value()) + ".";
      }
    }
    if (table.parameters != first.parameters) {
      return "the parameters of rule " + table.rule + " of table '" + table.name + "' must be those of the other tables of its group.";
    }
    spec->texts.push_back(text);
    spec->names.push_back(table.name);
    spec->seeds.push_back(static_cast<uint64_t>(table.seed));
    spec->limits.push_back(table.limits);
    spec->ttl_minutes.push_back(table.ttl_minutes);
    spec->memory_budget += table.memory_budget;
    spec->hot_rows += table.hot_rows;
    if (spec->memory_budget > kMostCount || spec->hot_rows > kMostPositions) {
      return "memory_budget_per_rank and hot_rows_per_rank of a group must sum to at most " + std::to_string(kMostCount) +
             " and " + std::to_string(kMostPositions) + ", got more at table '" + table.name + "'.";
    }
  }
  return "";
}

}  // namespace fusedrec
