// Gate and norm behind jagged attention against their definitions in double, for every engine: both orders of gate and
// norm, groups, with and without weights. Threads that share the heads of a block give the bits of one thread.
#include "check.h"
#include "jagged_batch.h"
#include "threads.h"

namespace fusedrec {
namespace {

constexpr int64_t kColumns = kHeads * kValueDim;
constexpr float kEpsilon = 1e-2f;

struct Form {
  bool weights, per_head, gate_first;
};

struct Results {
  std::vector<float> attended, out, gate_grads, attended_grads, weight_grads, bias_grads;
};

struct Gate {
  std::vector<float> gate, weight, bias;

  Gate(int64_t tokens, bool weights) {
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    for (auto* numbers : {&gate, &weight, &bias}) {
      numbers->resize(numbers == &gate ? tokens * kColumns : weights ? kColumns : 0);
      for (float& number : *numbers) number = normal(random);
    }
  }
};

Results Run(const Batch& batch, const Gate& gate, const Form& form, const TileEngine& engine,
            const ParallelFor& parallel_for) {
  const AttentionInputs inputs = {batch.query.data(), batch.key.data(), batch.value.data(), kQkDim, kValueDim, 0.8f,
                                  absl::MakeConstSpan(batch.scale), true};
  const GateInputs gate_inputs = {gate.gate.data(), gate.weight, gate.bias, form.per_head, form.gate_first, kEpsilon};
  const JaggedRows rows = batch.Rows({0, 0, 0, 0});
  const auto unset = [](size_t size) { return std::vector<float>(size, 1e30f); };
  Results r = {unset(batch.value.size()), unset(batch.value.size()), unset(batch.value.size()),
               unset(batch.value.size()), unset(gate.weight.size()), unset(gate.bias.size())};
  GatedAttention(rows, inputs, gate_inputs, RelativeBias(), engine, parallel_for, r.attended.data(), r.out.data());
  OutputGateGrad(kHeads, kValueDim, batch.splits.back(), gate_inputs, r.attended.data(), batch.grads.data(), engine,
                 parallel_for, r.attended_grads.data(),
                 {r.gate_grads.data(), absl::MakeSpan(r.weight_grads), absl::MakeSpan(r.bias_grads)});
  return r;
}

// The definitions, from the attention that the engine computed.
void CheckForm(const Batch& batch, const Gate& gate, const Form& form, const Results& found, const char* engine) {
  const int64_t tokens = batch.splits.back(), width = form.per_head ? kValueDim : kColumns;
  std::vector<double> out(tokens * kColumns), gate_grads(out), attended_grads(out);
  std::vector<double> weight_grads(gate.weight.size(), 0.0), bias_grads(gate.bias.size(), 0.0);
  for (int64_t begin = 0; begin < tokens * kColumns; begin += width) {
    const auto input = [&](int64_t at) {
      return static_cast<double>(found.attended[at]) * (form.gate_first ? gate.gate[at] : 1.0);
    };
    double mean = 0.0, variance = 0.0, of_mean = 0.0, projection = 0.0;
    for (int64_t at = begin; at < begin + width; ++at) mean += input(at) / width;
    for (int64_t at = begin; at < begin + width; ++at) variance += (input(at) - mean) * (input(at) - mean) / width;
    const double deviation = std::sqrt(variance + kEpsilon);
    const auto normalized = [&](int64_t at) { return (input(at) - mean) / deviation; };
    const auto weight = [&](int64_t at) { return form.weights ? gate.weight[at % kColumns] : 1.0; };
    const auto behind = [&](int64_t at) { return batch.grads[at] * (form.gate_first ? 1.0 : gate.gate[at]); };
    for (int64_t at = begin; at < begin + width; ++at) {
      of_mean += behind(at) * weight(at) / width;
      projection += behind(at) * weight(at) * normalized(at) / width;
    }
    for (int64_t at = begin; at < begin + width; ++at) {
      const double y = normalized(at) * weight(at) + (form.weights ? gate.bias[at % kColumns] : 0.0);
      const double dx = (behind(at) * weight(at) - of_mean - normalized(at) * projection) / deviation;
      out[at] = form.gate_first ? y : y * gate.gate[at];
      gate_grads[at] = form.gate_first ? dx * found.attended[at] : y * batch.grads[at];
      attended_grads[at] = form.gate_first ? dx * gate.gate[at] : dx;
      if (!form.weights) continue;
      weight_grads[at % kColumns] += behind(at) * normalized(at);
      bias_grads[at % kColumns] += behind(at);
    }
  }
  CheckClose(found.out, out, "out", engine);
  CheckClose(found.gate_grads, gate_grads, "gate_grads", engine);
  CheckClose(found.attended_grads, attended_grads, "attended_grads", engine);
  CheckClose(found.weight_grads, weight_grads, "weight_grads", engine);
  CheckClose(found.bias_grads, bias_grads, "bias_grads", engine);
}

void EveryForm(const std::vector<int64_t>& lengths) {
  const Batch batch(lengths, {0, 0, 0, 0}, false);
  for (const Form& form : {Form{false, false, false}, Form{true, false, false}, Form{true, true, false},
                           Form{true, false, true}, Form{false, true, true}}) {
    const Gate gate(batch.splits.back(), form.weights);
    for (const TileEngine* engine : Engines()) {
      const Results found = Run(batch, gate, form, *engine, SerialFor);
      CheckForm(batch, gate, form, found, engine->name);
      const Results again = Run(batch, gate, form, *engine, Threads(3));
      CHECK(found.out == again.out && found.weight_grads == again.weight_grads, "", engine->name,
            ": other bits with three threads");
    }
  }
}

}  // namespace
}  // namespace fusedrec

TEST(jagged_gate) {
  using namespace fusedrec;
  EveryForm(AwkwardLengths());
  EveryForm({600, 3});
  EveryForm({});
}
