// Ops that take time and no core, as a computation on an accelerator does, and a record of when things ran.
//
// A stream is a thread that sleeps. An op on a stream begins when it is asked for and the op before it has ended; it ends
// a given time later. Times are seconds of the monotonic clock, which all processes of a machine share.
#include <algorithm>
#include <chrono>
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
using Clock = std::chrono::steady_clock;

double Now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

// ---- the record

struct Event {
  std::string name;
  bool ended;
  double at;
};

// The record lives as long as the process.
struct Record {
  std::mutex mutex;
  std::vector<Event> events;
};
Record& record = *new Record;

void Add(const std::string& name, bool ended, double at) {
  std::lock_guard<std::mutex> lock(record.mutex);
  record.events.push_back({name, ended, at});
}

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
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return !tasks_.empty(); });
      const Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      const double begin = std::max(task.asked, free_at);
      free_at = begin + std::max(task.seconds, 0.0);
      std::this_thread::sleep_until(Clock::time_point(
          std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(free_at))));
      Add(name_, false, begin);
      Add(name_, true, free_at);
      task.done();
    }
  }

  const std::string name_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Task> tasks_;
};

// ---- a turn on a stream

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

REGISTER_OP("FusedrecBench>After")
    .Input("value: T")
    .Input("ended: S")
    .Output("same: T")
    .Attr("T: type")
    .Attr("S: type")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    })
    .Doc("Hands a tensor on when another one exists.");

class AfterOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override { ctx->set_output(0, ctx->input(0)); }
};

REGISTER_KERNEL_BUILDER(Name("FusedrecBench>After").Device(DEVICE_CPU), AfterOp);

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
    Add(event_, ended_, Now());
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
    std::vector<Event> events;
    {
      std::lock_guard<std::mutex> lock(record.mutex);
      events.swap(record.events);
    }
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
