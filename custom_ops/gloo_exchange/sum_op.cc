// Sums over the ranks of a set: of the loss' weights, and of dense gradients.
//
// For a small sum, each rank sends its value to all others. For a larger one, each rank sums one part: the others send
// it their values, and it returns the sum. Hosts do this inside first, so that the network between them carries one value
// per host, and not one per rank. All ranks get the same bits.
#include <algorithm>

#include "gloo_exchange/collective.h"
#include "tensorflow/core/framework/common_shape_fns.h"

namespace fusedrec {
namespace {

REGISTER_OP("Fusedrec>ExchangeSum")
    .Input("values: N * T").Output("sums: N * T")
    .Attr("N: int >= 1").Attr("T: {float, double, int32, int64}").Attr("collective: string").Attr("ranks: list(int)")
    .Attr("ranks_of_host: int >= 1").Attr("mean: bool")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      for (int i = 0; i < c->num_inputs(); ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    })
    .Doc("Sums tensors over the ranks of a set, or gives their mean. Each ranks_of_host neighbors share a host.");

// Up to so many bytes, a message costs by its number rather than by its size.
constexpr size_t kSmall = 4 * 1024;

struct Part {
  int64_t begin, end;  // elements
  int64_t size() const { return end - begin; }
};

// One exchange among some ranks of the set: each sums its part of `whole`, or all of it where `is_direct`.
struct Stage {
  std::vector<int> peers;  // places in the set, ascending
  int self;                // place of this rank among them
  bool is_direct;
  Part whole;
  Tensor copies;  // of what this rank sums, by the others: [peers, elements]
  GlooBuffer received, gathered;

  int size() const { return static_cast<int>(peers.size()); }
  Part Of(int peer) const {
    if (is_direct) return whole;
    return {whole.begin + whole.size() * peer / size(), whole.begin + whole.size() * (peer + 1) / size()};
  }
  template <typename Function>
  void ForOthers(const Function& function) const {
    fusedrec::ForOthers(self, size(), function);
  }
};

struct SumCall {
  RunningCall running;
  Tensor sums;  // all values in a row
  std::vector<Stage> stages;
  GlooBuffer sent;
};

template <typename T>
class ExchangeSumOp : public ExchangeCallOp<SumCall> {
 public:
  explicit ExchangeSumOp(OpKernelConstruction* ctx) : ExchangeCallOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ranks_of_host", &ranks_of_host_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("mean", &mean_));
    OP_REQUIRES(ctx, collective_->size() % ranks_of_host_ == 0,
                Invalid("ranks_of_host must divide ", collective_->size(), ", the number of ranks, got ", ranks_of_host_,
                        ". Use that number where hosts have different numbers of ranks."));
  }

 protected:
  absl::Status Begin(OpKernelContext* ctx, SumCall* call) const override {
    int64_t n = 0;
    for (int i = 0; i < ctx->num_inputs(); ++i) n += ctx->input(i).NumElements();
    if (ctx->num_inputs() == 1) {  // in place where nothing else reads the value
      FUSEDREC_TRY(ctx->forward_input_or_allocate_temp({0}, kType, ctx->input(0).shape(), &call->sums));
    } else {
      FUSEDREC_TRY(ctx->allocate_temp(kType, TensorShape({n}), &call->sums));
    }
    T* sums = Sums(call);
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      const auto value = In<T>(ctx->input(i));
      if (value.data() != sums) std::copy(value.begin(), value.end(), sums);
      sums += value.size();
    }
    call->stages = Stages(n);
    for (Stage& stage : call->stages) {
      const TensorShape copies({stage.size(), stage.Of(stage.self).size()});
      FUSEDREC_TRY(ctx->allocate_temp(kType, copies, &stage.copies));
    }
    {
      std::lock_guard<std::mutex> lock(collective_->mutex);
      FUSEDREC_TRY(RunningCall::RequireNone(*collective_));
      call->running.Begin(collective_);
    }
    for (size_t s = 0; s < call->stages.size(); ++s) PostReceives(call, s);
    call->sent = Mesh::OfProcess()->Buffer(Sums(call), n * sizeof(T));
    Send(call, 0, kReduce);
    return absl::OkStatus();
  }

  absl::Status Finish(OpKernelContext* ctx, SumCall* call) const override {
    int sends = 0;
    const auto wait_sent = [&] {
      for (; sends > 0; --sends) call->sent->waitSend();
    };
    for (size_t s = 0; s < call->stages.size(); ++s) {
      Stage& stage = call->stages[s];
      if (s > 0) Send(call, s, kReduce);
      sends += stage.size() - 1;
      stage.ForOthers([&](int) { stage.received->waitRecv(); });
      if (stage.is_direct) wait_sent();  // what is sent is what the sum overwrites
      Add(&stage, Sums(call));
    }
    if (mean_) {
      const Stage& last = call->stages.back();
      const Part part = last.Of(last.self);
      T *const begin = Sums(call) + part.begin, *const end = Sums(call) + part.end;
      std::transform(begin, end, begin, [n = static_cast<T>(collective_->size())](T sum) { return sum / n; });
    }
    for (size_t s = call->stages.size(); s-- > 0;) {
      const Stage& stage = call->stages[s];
      if (stage.is_direct) continue;
      Send(call, s, kGather);
      sends += stage.size() - 1;
      stage.ForOthers([&](int) { stage.gathered->waitRecv(); });
    }
    wait_sent();
    if (ctx->num_inputs() == 1) {
      ctx->set_output(0, call->sums);
      return absl::OkStatus();
    }
    const T* sums = Sums(call);
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      Tensor* out;
      FUSEDREC_TRY(ctx->allocate_output(i, ctx->input(i).shape(), &out));
      std::copy_n(sums, out->NumElements(), Out<T>(out).begin());
      sums += out->NumElements();
    }
    return absl::OkStatus();
  }

 private:
  enum Direction { kReduce, kGather };
  static constexpr tensorflow::DataType kType = tensorflow::DataTypeToEnum<T>::value;

  static T* Sums(SumCall* call) { return call->sums.flat<T>().data(); }

  std::vector<Stage> Stages(int64_t n) const {
    const int size = collective_->size(), here = collective_->index;
    const bool is_small = n * sizeof(T) <= kSmall;
    const int inside = is_small ? size : ranks_of_host_;
    std::vector<Stage> stages;
    const auto add = [&](int first, int step, int count) {
      Stage& stage = stages.emplace_back();
      for (int i = 0; i < count; ++i) stage.peers.push_back(first + i * step);
      stage.self = (here - first) / step;
    };
    if (inside > 1) add(here / inside * inside, 1, inside);
    if (inside < size) add(here % inside, inside, size / inside);
    Part whole{0, n};
    for (Stage& stage : stages) {
      // Between two ranks, parts and their sums would be as many bytes as all values at once, in twice the time.
      stage.is_direct = &stage == &stages.back() && (is_small || stage.size() == 2);
      stage.whole = whole;
      whole = stage.Of(stage.self);
    }
    return stages;
  }

  uint64_t Slot(const SumCall& call, size_t stage, Direction direction) const {
    return collective_->Slot(2 * static_cast<int>(stage) + direction, call.running.number());
  }

  void PostReceives(SumCall* call, size_t s) const {
    Stage& stage = call->stages[s];
    const size_t bytes = stage.Of(stage.self).size() * sizeof(T);
    stage.received = Mesh::OfProcess()->Buffer(stage.copies.flat<T>().data(), bytes * stage.size());
    stage.ForOthers([&](int i) {
      stage.received->recv(Rank(stage, i), Slot(*call, s, kReduce), i * bytes, bytes);
    });
    if (stage.is_direct) return;
    stage.gathered = Mesh::OfProcess()->Buffer(Sums(call), call->sums.NumElements() * sizeof(T));
    stage.ForOthers([&](int i) {
      const Part part = stage.Of(i);
      stage.gathered->recv(Rank(stage, i), Slot(*call, s, kGather), part.begin * sizeof(T), part.size() * sizeof(T));
    });
  }

  void Send(SumCall* call, size_t s, Direction direction) const {
    const Stage& stage = call->stages[s];
    stage.ForOthers([&](int i) {
      const Part part = stage.Of(direction == kReduce ? i : stage.self);
      call->sent->send(Rank(stage, i), Slot(*call, s, direction), part.begin * sizeof(T), part.size() * sizeof(T));
    });
  }

  // Adds in the order of ranks, and so alike on all ranks.
  static void Add(Stage* stage, T* sums) {
    const Part part = stage->Of(stage->self);
    T *const own = sums + part.begin, *const copies = stage->copies.flat<T>().data();
    const auto add = [n = part.size()](const T* values, T* to) {
      for (int64_t j = 0; j < n; ++j) to[j] += values[j];
    };
    for (int i = 1; i < stage->self; ++i) add(copies + i * part.size(), copies);
    if (stage->self > 0) add(copies, own);
    for (int i = stage->self + 1; i < stage->size(); ++i) add(copies + i * part.size(), own);
  }

  int Rank(const Stage& stage, int peer) const { return collective_->ranks[stage.peers[peer]]; }

  int ranks_of_host_;
  bool mean_;
};

#define FUSEDREC_REGISTER_SUM(T) \
  REGISTER_KERNEL_BUILDER( \
      Name("Fusedrec>ExchangeSum").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), ExchangeSumOp<T>)
FUSEDREC_REGISTER_SUM(float);
FUSEDREC_REGISTER_SUM(double);
FUSEDREC_REGISTER_SUM(int32_t);
FUSEDREC_REGISTER_SUM(int64_t);

}  // namespace
}  // namespace fusedrec
