// Shape functions from a line of text, in the notation of docstrings.
//     .SetShapeFn(Shapes("[p,d] [n] -> [n,d]"))
//
// Inputs, `->`, outputs; one operand for each argument.
//   [n,d]           its dimensions; [] is a scalar
//   features*[n]    a list: the attribute `features` is its length or types; dimensions of entry i belong to entry i
//   =num_rows       a scalar input whose value, if the graph has it, is the dimension num_rows
//   *               any shape
// A dimension of several inputs has the first size that is known. The kernel refuses others, because its messages name
// them. An output has a number, or names a dimension of the inputs or an attribute, an int or a list with one
// for each entry; else its size is unknown. `n+1` is one more than n; `n unless pad` is unknown where `pad` is true.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "common/limits.h"
#include "common/try.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

class Shapes {
 public:
  explicit Shapes(const char* text) {
    std::vector<Operand>* operands = &inputs_;
    for (const char* at = text; *at != '\0';) {
      const std::string rest = at;
      if (*at == ' ') {
        ++at;
      } else if (rest.rfind("->", 0) == 0) {
        operands = &outputs_;
        at += 2;
      } else {
        const size_t open = rest.find_first_of("[ ");
        const bool has_dims = open != rest.npos && rest[open] == '[';
        operands->push_back(Read(rest.substr(0, has_dims ? rest.find(']') + 1 : open)));
        at += operands->back().length;
      }
    }
  }

  absl::Status operator()(tensorflow::shape_inference::InferenceContext* c) const {
    Sizes sizes;
    int place = 0;
    for (const Operand& operand : inputs_) {
      int64_t count;
      FUSEDREC_TRY(CountOf(operand, c, &count));
      for (int64_t i = 0; i < count; ++i, ++place) FUSEDREC_TRY(ReadInput(operand, c, place, &sizes));
    }
    place = 0;
    for (const Operand& operand : outputs_) {
      int64_t count;
      FUSEDREC_TRY(CountOf(operand, c, &count));
      for (int64_t i = 0; i < count; ++i, ++place) {
        std::vector<Size> dims(operand.dims.size());
        const int64_t entry = operand.list.empty() ? -1 : i;
        for (size_t d = 0; d < dims.size(); ++d) FUSEDREC_TRY(SizeOf(operand.dims[d], c, entry, sizes, &dims[d]));
        c->set_output(place, operand.is_any ? c->UnknownShape() : c->MakeShape(dims));
      }
    }
    return absl::OkStatus();
  }

 private:
  using Context = tensorflow::shape_inference::InferenceContext;
  using Size = tensorflow::shape_inference::DimensionHandle;
  using Sizes = std::map<std::string, std::vector<Size>>;  // of one argument, or of each in a list

  struct Dim {
    std::string name, unless;
    int64_t more = 0;
  };
  struct Operand {
    std::string list, value;  // attribute of its length; name of the dimension that it is the value of
    std::vector<Dim> dims;
    bool is_any = false;
    size_t length = 0;  // of the text
  };

  static Operand Read(const std::string& text) {
    Operand operand;
    operand.length = text.size();
    operand.is_any = text == "*";
    if (text[0] == '=') operand.value = text.substr(1);
    const size_t open = text.find('[');
    if (open == text.npos) return operand;
    if (open > 0) operand.list = text.substr(0, open - 1);
    const std::string dims = text.substr(open + 1, text.size() - open - 2);
    for (const std::string& part : std::vector<std::string>(absl::StrSplit(dims, ',', absl::SkipEmpty()))) {
      const size_t unless = part.find(" unless "), sign = part.find('+');
      Dim& dim = operand.dims.emplace_back();
      dim.name = part.substr(0, std::min(unless, sign));
      if (unless != part.npos) dim.unless = part.substr(unless + 8);
      if (sign != part.npos) dim.more = std::atoll(part.c_str() + sign);
    }
    return operand;
  }

  static absl::Status CountOf(const Operand& operand, Context* c, int64_t* count) {
    *count = 1;
    std::vector<tensorflow::DataType> types;
    if (operand.list.empty() || c->GetAttr(operand.list, count).ok()) return absl::OkStatus();
    FUSEDREC_TRY(c->GetAttr(operand.list, &types));
    *count = types.size();
    return absl::OkStatus();
  }

  static absl::Status ReadInput(const Operand& operand, Context* c, int place, Sizes* sizes) {
    if (operand.is_any) return absl::OkStatus();
    tensorflow::shape_inference::ShapeHandle shape;
    FUSEDREC_TRY(c->WithRank(c->input(place), operand.dims.size(), &shape));
    if (!operand.value.empty()) {
      const tensorflow::Tensor* known = c->input_tensor(place);
      if (known != nullptr) {
        FUSEDREC_TRY(RequireIn(operand.value.c_str(), known->scalar<int64_t>()(), 0, kMostPositions,
                                     "the number of rows that were read from."));
      }
      return c->MakeDimForScalarInput(place, &(*sizes)[operand.value].emplace_back());
    }
    for (size_t d = 0; d < operand.dims.size(); ++d) {
      Size size = c->Dim(shape, d);
      const Dim& dim = operand.dims[d];
      // Fewer than none are the kernel's to refuse.
      if (dim.more > 0) {
        const bool is_known = c->ValueKnown(size) && c->Value(size) >= dim.more;
        size = is_known ? c->MakeDim(c->Value(size) - dim.more) : c->UnknownDim();
      }
      (*sizes)[dim.name].push_back(size);
    }
    return absl::OkStatus();
  }

  // entry: of a list, or -1.
  static absl::Status SizeOf(const Dim& dim, Context* c, int64_t entry, const Sizes& sizes, Size* size) {
    *size = c->UnknownDim();
    bool unknown = false;
    if (!dim.unless.empty()) FUSEDREC_TRY(c->GetAttr(dim.unless, &unknown));
    if (unknown) return absl::OkStatus();
    int64_t number;
    std::vector<int64_t> numbers;
    if (const auto named = sizes.find(dim.name); named != sizes.end()) {
      const std::vector<Size>& of = named->second;
      const auto is_known = [&](const Size& each) { return c->ValueKnown(each); };
      const int64_t place = entry < 0 ? std::find_if(of.begin(), of.end(), is_known) - of.begin() : entry;
      *size = of[place < static_cast<int64_t>(of.size()) ? place : 0];
    } else if (std::isdigit(static_cast<unsigned char>(dim.name[0])) != 0) {
      *size = c->MakeDim(std::atoll(dim.name.c_str()));
    } else if (c->GetAttr(dim.name, &number).ok() ||
               (c->GetAttr(dim.name, &numbers).ok() && entry >= 0 && entry < static_cast<int64_t>(numbers.size()))) {
      if (!numbers.empty()) number = numbers[entry];
      FUSEDREC_TRY(RequireIn(dim.name.c_str(), number, 0, kMostCount, "a size that memory has."));
      *size = c->MakeDim(number);
    }
    return dim.more == 0 ? absl::OkStatus() : c->Add(*size, dim.more, size);
  }

  std::vector<Operand> inputs_, outputs_;
};

}  // namespace fusedrec
