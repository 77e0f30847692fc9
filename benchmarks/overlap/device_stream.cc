// Ops that take time and no core, as a computation on an accelerator does, and a record of when things ran.
//
// A stream is a thread that sleeps. An op on a stream begins when it is asked for and the op before it has ended; it ends
// a given time later. Its result is computed when it is asked for, which takes a pass over its inputs on the host, and is
// handed on when the stream's clock passes the end. Times are seconds of the monotonic clock, which all processes of a
// machine share.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec_bench {

using tensorflow::AsyncOpKernel;
using tensorflow::DEVICE_CPU;
using tensorflow::int64;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::tstring;
using tensorflow::shape_inference::InferenceContext;
using Clock = std::chrono::steady_clock;

constexpr char kDevice[] = "device";

double Now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

// ---- the record

struct Event {
  std::string name;
  bool ended;
  double at;
};

class Record {
 public:
  static Record& Get() {
    static Record* record = new Record;
    return *record;
  }
  void Add(const std::string& name, bool ended, double at) {
    std::lock_guard<std::mutex> lock(mutex_);
    events_.push_back({name, ended, at});
  }
  std::vector<Event> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(events_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<Event> events_;
};

// ---- streams

class Stream {
 public:
  // Streams live as long as the process: their threads never end.
  static Stream& Named(const std::string& name) {
    static std::mutex* mutex = new std::mutex;
    static auto* streams = new std::map<std::string, Stream*>;
    std::lock_guard<std::mutex> lock(*mutex);
    Stream*& stream = (*streams)[name];
    if (stream == nullptr) stream = new Stream(name);
    return *stream;
  }

  void Enqueue(double asked, double seconds, std::function<void()> done) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back({asked, seconds, std::move(done)});
    wake_.notify_one();
  }

 private:
  struct Task {
    double asked;
    double seconds;
    std::function<void()> done;
  };

  explicit Stream(std::string name) : name_(std::move(name)) {
    std::thread([this] { Run(); }).detach();
  }

  [[noreturn]] void Run() {
    double free_at = 0;
    for (;;) {
      Task task = Next();
      const double begin = std::max(task.asked, free_at);
      free_at = begin + std::max(task.seconds, 0.0);
      std::this_thread::sleep_until(Clock::time_point(
          std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(free_at))));
      Record::Get().Add(name_, false, begin);
      Record::Get().Add(name_, true, free_at);
      task.done();
    }
  }

  Task Next() {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return !tasks_.empty(); });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    return task;
  }

  const std::string name_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Task> tasks_;
};

// ---- a dense layer

REGISTER_OP("FusedrecBench>DeviceForward")
    .Input("rows: float")
    .Input("weight: float")
    .Input("seconds: double")
    .Output("hidden: float")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->Dim(c->input(0), 0)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The forward pass of a layer on the device stream: hidden[i] = sum(rows[i]) / sqrt(D) + mean(weight).

rows: [n, D].
weight: [P].
seconds: [2], time of the forward and of the backward pass.
hidden: [n].
)doc");

REGISTER_OP("FusedrecBench>DeviceBackward")
    .Input("grad: float")
    .Input("rows: float")
    .Input("weight: float")
    .Input("seconds: double")
    .Output("rows_grad: float")
    .Output("weight_grad: float")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(1));
      c->set_output(1, c->input(2));
      return absl::OkStatus();
    })
    .Doc("The backward pass of DeviceForward. grad: [n]; the other inputs as in DeviceForward.");

float Sum(const float* values, int64 count) {
  float parts[16] = {};  // the compiler makes vectors of them
  int64 i = 0;
  for (; i + 16 <= count; i += 16) {
    for (int k = 0; k < 16; ++k) parts[k] += values[i + k];
  }
  for (; i < count; ++i) parts[0] += values[i];
  float sum = 0;
  for (float part : parts) sum += part;
  return sum;
}

class DeviceForwardOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const double asked = Now();
    const Tensor &rows = ctx->input(0), &weight = ctx->input(1);
    const int64 n = rows.dim_size(0), columns = rows.dim_size(1);
    Tensor* hidden = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(0, TensorShape({n}), &hidden), done);
    const float bias = Sum(weight.flat<float>().data(), weight.NumElements()) / weight.NumElements();
    const float scale = 1 / std::sqrt(static_cast<float>(columns));
    const float* in = rows.flat<float>().data();
    float* out = hidden->flat<float>().data();
    for (int64 i = 0; i < n; ++i) out[i] = scale * Sum(in + i * columns, columns) + bias;
    Stream::Named(kDevice).Enqueue(asked, ctx->input(2).flat<double>()(0), std::move(done));
  }
};

class DeviceBackwardOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const double asked = Now();
    const Tensor &grad = ctx->input(0), &rows = ctx->input(1), &weight = ctx->input(2);
    Tensor *rows_grad = nullptr, *weight_grad = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(0, rows.shape(), &rows_grad), done);
    OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(1, weight.shape(), &weight_grad), done);
    const int64 n = rows.dim_size(0), columns = rows.dim_size(1);
    const float scale = 1 / std::sqrt(static_cast<float>(columns));
    const float* in = grad.flat<float>().data();
    float* out = rows_grad->flat<float>().data();
    for (int64 i = 0; i < n; ++i) std::fill_n(out + i * columns, columns, scale * in[i]);
    weight_grad->flat<float>().setConstant(Sum(in, n) / weight.NumElements());
    Stream::Named(kDevice).Enqueue(asked, ctx->input(3).flat<double>()(1), std::move(done));
  }
};

REGISTER_KERNEL_BUILDER(Name("FusedrecBench>DeviceForward").Device(DEVICE_CPU), DeviceForwardOp);
REGISTER_KERNEL_BUILDER(Name("FusedrecBench>DeviceBackward").Device(DEVICE_CPU), DeviceBackwardOp);

// ---- a slow memory

REGISTER_OP("FusedrecBench>Delay")
    .Input("value: T")
    .Input("seconds: double")
    .Output("same: T")
    .Attr("T: type")
    .Attr("stream: string")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("Hands a tensor on after its turn on a stream. seconds: []; at most 0 means at once, without a turn.");

class DelayOp : public AsyncOpKernel {
 public:
  explicit DelayOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("stream", &stream_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    ctx->set_output(0, ctx->input(0));
    const double seconds = ctx->input(1).scalar<double>()();
    if (seconds <= 0) return done();
    Stream::Named(stream_).Enqueue(Now(), seconds, std::move(done));
  }

 private:
  std::string stream_;
};

REGISTER_KERNEL_BUILDER(Name("FusedrecBench>Delay").Device(DEVICE_CPU), DelayOp);

// ---- marks, and what was recorded

REGISTER_OP("FusedrecBench>Stamp")
    .Input("value: T")
    .Output("same: T")
    .Attr("T: type")
    .Attr("event: string")
    .Attr("ended: bool")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("Passes a tensor through and records the time under the name of an event.");

class StampOp : public OpKernel {
 public:
  explicit StampOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("event", &event_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ended", &ended_));
  }

  void Compute(OpKernelContext* ctx) override {
    Record::Get().Add(event_, ended_, Now());
    ctx->set_output(0, ctx->input(0));
  }

  bool IsExpensive() override { return false; }

 private:
  std::string event_;
  bool ended_ = false;
};

REGISTER_KERNEL_BUILDER(Name("FusedrecBench>Stamp").Device(DEVICE_CPU), StampOp);

REGISTER_OP("FusedrecBench>TakeRecord")
    .Output("names: string")
    .Output("ended: bool")
    .Output("at: double")
    .SetIsStateful()
    .Doc("Returns all events recorded since the last call, in the order of their record, and forgets them.");

class TakeRecordOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const std::vector<Event> events = Record::Get().Take();
    const TensorShape shape({static_cast<int64>(events.size())});
    Tensor *names = nullptr, *ended = nullptr, *at = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &names));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, shape, &ended));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, shape, &at));
    for (size_t i = 0; i < events.size(); ++i) {
      names->flat<tstring>()(i) = events[i].name;
      ended->flat<bool>()(i) = events[i].ended;
      at->flat<double>()(i) = events[i].at;
    }
  }
};

REGISTER_KERNEL_BUILDER(Name("FusedrecBench>TakeRecord").Device(DEVICE_CPU), TakeRecordOp);

}  // namespace fusedrec_bench
