// Ops that take time and no core, as a computation on an accelerator does, and a record of when things ran.
//
// A stream is a queue, as of the kernels of a GPU. An op begins when it has been launched and the op before it has ended;
// it ends a given time later. A launch takes no time. The host waits only where it reads a result. Times are seconds of
// the monotonic clock, which all processes of a machine share.
#include <algorithm>
#include <chrono>
#include <condition_variable>
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
  double bytes;
};

// The record lives as long as the process.
struct Record {
  std::mutex mutex;
  std::vector<Event> events;
};
Record& record = *new Record;

void Add(const std::string& name, bool ended, double at, double bytes) {
  std::lock_guard<std::mutex> lock(record.mutex);
  record.events.push_back({name, ended, at, bytes});
}

// ---- streams

class Stream {
 public:
  // Streams live as long as the process.
  static Stream& Named(const std::string& name) {
    static std::mutex* mutex = new std::mutex;
    static auto* streams = new std::map<std::string, Stream*>;
    std::lock_guard<std::mutex> lock(*mutex);
    Stream*& stream = (*streams)[name];
    if (stream == nullptr) stream = new Stream(name);
    return *stream;
  }

  // Returns when an op that is launched now will end.
  double Launch(double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    const double begin = std::max(Now(), free_at_);
    free_at_ = begin + seconds;
    Add(name_, false, begin, 0);
    Add(name_, true, free_at_, 0);
    return free_at_;
  }

 private:
  explicit Stream(std::string name) : name_(std::move(name)) {}

  const std::string name_;
  std::mutex mutex_;
  double free_at_ = 0;
};

// A thread that calls back at given times.
class Timer {
 public:
  // Lives as long as the process: its thread never ends.
  static Timer& OfProcess() {
    static Timer* timer = new Timer;
    return *timer;
  }

  void At(double time, std::function<void()> done) {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.emplace(time, std::move(done));
    wake_.notify_one();
  }

 private:
  Timer() {
    std::thread([this] { Run(); }).detach();
  }

  [[noreturn]] void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (waiting_.empty()) {
        wake_.wait(lock);
      } else if (const auto first = waiting_.begin(); first->first > Now()) {
        wake_.wait_until(lock, Clock::time_point(std::chrono::duration_cast<Clock::duration>(
                                   std::chrono::duration<double>(first->first))));
      } else {
        const std::function<void()> done = std::move(first->second);
        waiting_.erase(first);
        lock.unlock();
        done();
        lock.lock();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::multimap<double, std::function<void()>> waiting_;
};

// ---- a turn on a stream

REGISTER_OP("FusedrecBench>Launch")
    .Input("value: T")
    .Input("seconds: double")
    .Output("ends: double")
    .Attr("T: type")
    .Attr("stream: string")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("Launches an op when the value exists, and says when it ends. seconds: []; at most 0 means without a turn.");

class LaunchOp : public OpKernel {
 public:
  explicit LaunchOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("stream", &stream_));
  }

  void Compute(OpKernelContext* ctx) override {
    Tensor* ends;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &ends));
    const double seconds = ctx->input(1).scalar<double>()();
    ends->scalar<double>()() = seconds > 0 ? Stream::Named(stream_).Launch(seconds) : 0;
  }

 private:
  std::string stream_;
};

REGISTER_KERNEL_BUILDER(Name("FusedrecBench>Launch").Device(DEVICE_CPU), LaunchOp);

REGISTER_OP("FusedrecBench>Launched")
    .Input("value: T")
    .Input("ends: double")
    .Output("same: T")
    .Attr("T: type")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("Hands a tensor to an op of the same stream, which may be launched now.");

class LaunchedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override { ctx->set_output(0, ctx->input(0)); }
  bool IsExpensive() override { return false; }
};

REGISTER_KERNEL_BUILDER(Name("FusedrecBench>Launched").Device(DEVICE_CPU), LaunchedOp);

REGISTER_OP("FusedrecBench>Ended")
    .Input("value: T")
    .Input("ends: double")
    .Output("same: T")
    .Attr("T: type")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("Hands a tensor to the host at a time of Launch, when the op has ended.");

class EndedOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    ctx->set_output(0, ctx->input(0));
    const double ends = ctx->input(1).scalar<double>()();
    if (ends <= Now()) return done();
    Timer::OfProcess().At(ends, std::move(done));
  }
};

REGISTER_KERNEL_BUILDER(Name("FusedrecBench>Ended").Device(DEVICE_CPU), EndedOp);

// ---- marks, and what was recorded

REGISTER_OP("FusedrecBench>Stamp")
    .Input("value: T")
    .Output("same: T")
    .Attr("T: type")
    .Attr("event: string")
    .Attr("ended: bool")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("Passes a tensor through and records the time and its bytes under the name of an event.");

class StampOp : public OpKernel {
 public:
  explicit StampOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("event", &event_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ended", &ended_));
  }

  void Compute(OpKernelContext* ctx) override {
    Add(event_, ended_, Now(), static_cast<double>(ctx->input(0).TotalBytes()));
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
    .Output("bytes: double")
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
    Tensor *names = nullptr, *ended = nullptr, *at = nullptr, *bytes = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &names));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, shape, &ended));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, shape, &at));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(3, shape, &bytes));
    for (size_t i = 0; i < events.size(); ++i) {
      names->flat<tstring>()(i) = events[i].name;
      ended->flat<bool>()(i) = events[i].ended;
      at->flat<double>()(i) = events[i].at;
      bytes->flat<double>()(i) = events[i].bytes;
    }
  }
};

REGISTER_KERNEL_BUILDER(Name("FusedrecBench>TakeRecord").Device(DEVICE_CPU), TakeRecordOp);

}  // namespace fusedrec_bench
