// All-to-alls of rows, and sums, among GPUs over NCCL.
//
// All ranks must launch the calls of a communicator in one order, and TensorFlow runs ops in any order. So rank 0
// launches its calls as they become ready, and announces each one over Gloo. The others launch in the announced order.
//
// The calls have a stream of their own, which waits for the work that the op's stream had before the op. The op ends
// when its call has, so neither a computing thread nor the op's stream waits.
//
// The build needs neither NCCL nor CUDA: Load() finds the functions by name.
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <numeric>
#include <thread>

#include "gloo_exchange/collective.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/platform/env.h"
#include "xla/stream_executor/stream.h"

namespace fusedrec {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Fusedrec>NcclAllToAll")
    .Input("rows: T").Input("splits: int32").Input("received_splits: int32").Output("received: T")
    .Attr("T: {half, bfloat16, float, double}").Attr("collective: string").Attr("ranks: list(int)")
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc("Sends slices of the rows to all ranks. The splits are in host memory.");

REGISTER_OP("Fusedrec>NcclSum")
    .Input("values: N * T").Output("sums: N * T")
    .Attr("N: int >= 1").Attr("T: {float, double, int64}").Attr("collective: string").Attr("ranks: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_inputs(); ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    })
    .Doc("Sums tensors over all ranks.");

struct UniqueId {  // ncclUniqueId
  char bytes[128];
};
enum NumberType { kInt8 = 0, kInt64 = 4, kFloat32 = 7, kFloat64 = 8 };  // ncclDataType_t
constexpr int kAdd = 0;                                                 // ncclSum
constexpr unsigned kNonBlocking = 1;                                    // CU_STREAM_NON_BLOCKING
constexpr unsigned kSleepsWithoutTiming = 3;  // CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING

// Functions of NCCL 2 and of CUDA's driver. They return 0, or an error. Handles are void*.
#define FUSEDREC_FUNCTIONS(F)                                                              \
  F(ncclGetUniqueId, UniqueId*)                                                            \
  F(ncclCommInitRank, void** comm, int size, UniqueId, int rank)                           \
  F(ncclCommAbort, void* comm)                                                             \
  F(ncclCommGetAsyncError, void* comm, int* error)                                         \
  F(ncclGroupStart)                                                                        \
  F(ncclGroupEnd)                                                                          \
  F(ncclSend, const void*, size_t, int type, int peer, void* comm, void* stream)           \
  F(ncclRecv, void*, size_t, int type, int peer, void* comm, void* stream)                 \
  F(ncclAllReduce, const void*, void*, size_t, int type, int op, void* comm, void* stream) \
  F(cuCtxSetCurrent, void* context)                                                        \
  F(cuStreamCreate, void** stream, unsigned)                                               \
  F(cuStreamGetCtx, void* stream, void** context)                                          \
  F(cuStreamWaitEvent, void* stream, void* event, unsigned)                                \
  F(cuEventCreate, void** event, unsigned)                                                 \
  F(cuEventRecord, void* event, void* stream)                                              \
  F(cuEventSynchronize, void* event)                                                       \
  F(cuEventDestroy_v2, void* event)

struct Functions {
#define FUSEDREC_DECLARE(name, ...) int (*name)(__VA_ARGS__);
  FUSEDREC_FUNCTIONS(FUSEDREC_DECLARE)
} functions;

absl::Status Failed(const char* what, int error) {
  return absl::InternalError(absl::StrCat(what, " failed with error ", error, ". NCCL_DEBUG=WARN prints more."));
}
#define FUSEDREC_CALL(name, ...)                                                      \
  do {                                                                                \
    if (const int error = functions.name(__VA_ARGS__)) return Failed(#name, error); \
  } while (false)

// A library that stands for NCCL without a GPU has the driver's functions, too.
absl::Status Load(const char* path) {
  auto* env = tensorflow::Env::Default();
  void *nccl, *cuda, *symbol;
  FUSEDREC_TRY(env->LoadDynamicLibrary(path, &nccl));
  const absl::Status driver = env->LoadDynamicLibrary("libcuda.so.1", &cuda);
#define FUSEDREC_FIND(name, ...)                                   \
  if (!env->GetSymbolFromLibrary(nccl, #name, &symbol).ok()) {     \
    FUSEDREC_TRY(driver);                                          \
    FUSEDREC_TRY(env->GetSymbolFromLibrary(cuda, #name, &symbol)); \
  }                                                                \
  functions.name = reinterpret_cast<decltype(functions.name)>(symbol);
  FUSEDREC_FUNCTIONS(FUSEDREC_FIND)
  return absl::OkStatus();
}

// One call under way.
struct NcclCall {
  ~NcclCall() {
    if (event != nullptr) functions.cuEventDestroy_v2(event);
  }

  RunningCall running;
  uint64_t key;  // the same on all ranks
  std::function<absl::Status(void* comm, void* stream)> enqueue;
  void* stream;           // of the op
  void* event = nullptr;  // after the work that the op's stream had before the op; then after the call
};

constexpr uint64_t kOrderSlot = 1;  // slots of messages have their highest bit set
constexpr int kMostCancelledS = 5;  // a call of a failed step may still end, because the other ranks have begun it

// The communicator of all ranks. Never destroyed, as its threads never end.
class Communicator {
 public:
  explicit Communicator(const UniqueId& id) : id_(id) {
    std::thread([this] { Watch(); }).detach();
    if (mesh_->rank() != 0) std::thread([this] { Listen(); }).detach();
  }

  // Launches a call in its turn, and sleeps until it has ended.
  absl::Status Run(OpKernelContext* ctx, const NcclCall& call) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto wait = [&](const auto& condition) {
      changed_.wait(lock, [&] { return !cause_.empty() || condition(); });
      return cause_.empty();
    };
    calls_[ctx] = 0;
    if (mesh_->rank() == 0) order_.push_back(call.key);
    if (wait([&] { return !order_.empty() && order_.front() == call.key; })) {
      lock.unlock();
      if (mesh_->rank() == 0) Announce(call.key);
      // Joining waits for other ranks, and cannot be aborted.
      if (comm_ == nullptr) RunWaiting([this, stream = call.stream] { Join(stream); });
      lock.lock();
    }
    bool is_launched = false;
    if (wait([&] { return comm_ != nullptr; })) {
      is_launching_ = true;
      lock.unlock();
      const absl::Status launched = Launch(call);
      lock.lock();
      is_launching_ = false;
      is_launched = launched.ok();
      order_.pop_front();
      Note(launched);
    }
    if (is_launched) {  // and uses the op's tensors until it or the abort has ended
      lock.unlock();
      const int error = functions.cuEventSynchronize(call.event);
      lock.lock();
      if (error != 0) Note(Failed("cuEventSynchronize", error));
    }
    calls_.erase(ctx);
    return cause_.empty() ? absl::OkStatus() : absl::InternalError(cause_);
  }

 private:
  // Wakes all threads. A failure ends the exchange. The caller holds the mutex.
  void Note(const absl::Status& status) {
    if (!status.ok() && cause_.empty()) {
      cause_ = std::string(status.message());
      mesh_->Fail(cause_);
    }
    changed_.notify_all();
  }

  void Announce(uint64_t key) {
    try {
      const GlooBuffer sent = mesh_->Buffer(&key, sizeof(key));
      ForOthers(0, mesh_->size(), [&](int rank) { sent->send(rank, kOrderSlot); });
      ForOthers(0, mesh_->size(), [&](int) { sent->waitSend(); });
    } catch (const std::exception&) {  // Watch() sees the end
    }
  }

  // Receives the order in a thread that never waits for an op.
  void Listen() {
    pthread_setname_np(pthread_self(), "nccl order");
    uint64_t key;
    const GlooBuffer received = mesh_->Buffer(&key, sizeof(key));
    try {
      for (;;) {
        received->recv(0, kOrderSlot);
        received->waitRecv();
        std::lock_guard<std::mutex> lock(mutex_);
        order_.push_back(key);
        changed_.notify_all();
      }
    } catch (const std::exception&) {  // the same
    }
  }

  // The GPU of this rank is known from the first call on.
  void Join(void* stream) {
    void* comm = nullptr;
    const auto join = [&] {
      FUSEDREC_CALL(cuStreamGetCtx, stream, &context_);
      FUSEDREC_CALL(cuCtxSetCurrent, context_);
      FUSEDREC_CALL(cuStreamCreate, &stream_, kNonBlocking);
      FUSEDREC_CALL(ncclCommInitRank, &comm, mesh_->size(), id_, mesh_->rank());
      return absl::OkStatus();
    };
    const absl::Status joined = join();
    std::lock_guard<std::mutex> lock(mutex_);
    comm_ = comm;
    Note(joined);
  }

  absl::Status Launch(const NcclCall& call) {
    FUSEDREC_CALL(cuCtxSetCurrent, context_);
    FUSEDREC_CALL(cuStreamWaitEvent, stream_, call.event, 0);
    FUSEDREC_CALL(ncclGroupStart);
    FUSEDREC_TRY(call.enqueue(comm_, stream_));
    FUSEDREC_CALL(ncclGroupEnd);
    FUSEDREC_CALL(cuEventRecord, call.event, stream_);
    return absl::OkStatus();
  }

  // Ends the exchange when a rank is lost, NCCL fails, or a failed step of this rank waits for other ranks.
  void Watch() {
    pthread_setname_np(pthread_self(), "nccl watch");
    std::string cause;
    for (; cause.empty(); cause = mesh_->Cause(std::chrono::seconds(1))) {
      std::lock_guard<std::mutex> lock(mutex_);
      int error = 0;
      if (comm_ != nullptr) functions.ncclCommGetAsyncError(comm_, &error);
      if (error != 0) Note(Failed("NCCL", error));
      for (auto& [ctx, cancelled_s] : calls_) {
        auto* step = ctx->cancellation_manager();
        if (step == nullptr || !step->IsCancelled() || ++cancelled_s <= kMostCancelledS) continue;
        Note(absl::CancelledError("a step has failed on this rank, and other ranks do not join its collectives."));
      }
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (cause_.empty()) cause_ = cause;
    changed_.notify_all();
    // The abort frees the communicator, and so waits for a launch that uses it, unless the launch hangs.
    changed_.wait_for(lock, std::chrono::seconds(5), [this] { return !is_launching_; });
    if (comm_ == nullptr || calls_.empty()) return;  // at the end of a program, CUDA may be gone
    lock.unlock();
    functions.cuCtxSetCurrent(context_);
    functions.ncclCommAbort(comm_);  // ends the calls under way
  }

  Mesh* const mesh_ = Mesh::OfProcess();
  const UniqueId id_;
  void *context_ = nullptr, *stream_ = nullptr;

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::atomic<void*> comm_{nullptr};
  std::map<OpKernelContext*, int> calls_;  // under way, and seconds since the step of each has failed
  std::deque<uint64_t> order_;             // keys of the calls to launch
  bool is_launching_ = false;
  std::string cause_;  // why the exchange has ended
};

Communicator* communicator = nullptr;

class NcclOp : public ExchangeCallOp<NcclCall> {
 public:
  using ExchangeCallOp::ExchangeCallOp;

 protected:
  // The caller has set call->enqueue. Its tensors live until the op ends.
  absl::Status Start(OpKernelContext* ctx, NcclCall* call) const {
    if (communicator == nullptr) {
      return absl::FailedPreconditionError("The ranks use another engine. Use tf_fusedrec.init(exchange=\"nccl\").");
    }
    const auto* device = ctx->op_device_context();  // nullptr on a CPU, where the tests run over an emulation
    call->stream = device == nullptr ? nullptr : device->stream()->platform_specific_handle().stream;
    FUSEDREC_CALL(cuEventCreate, &call->event, kSleepsWithoutTiming);
    FUSEDREC_CALL(cuEventRecord, call->event, call->stream);
    std::lock_guard<std::mutex> lock(collective_->mutex);
    FUSEDREC_TRY(RunningCall::RequireNone(*collective_));
    call->running.Begin(collective_);
    call->key = collective_->Slot(0, call->running.number());
    return absl::OkStatus();
  }

  absl::Status Finish(OpKernelContext* ctx, NcclCall* call) const override { return communicator->Run(ctx, *call); }
};

class NcclAllToAllOp : public NcclOp {
 public:
  using NcclOp::NcclOp;

 protected:
  absl::Status Begin(OpKernelContext* ctx, NcclCall* call) const override {
    const Tensor &rows = ctx->input(0), &splits = ctx->input(1), &received_splits = ctx->input(2);
    FUSEDREC_TRY(RequireSplits(rows, splits, collective_->size()));
    FUSEDREC_TRY(RequireRows("received_splits", received_splits, collective_->size()));
    const auto sizes = In<int32_t>(splits), received_sizes = In<int32_t>(received_splits);
    TensorShape shape = rows.shape();
    shape.set_dim(0, 1);
    const size_t row_bytes = shape.num_elements() * tensorflow::DataTypeSize(rows.dtype());
    shape.set_dim(0, std::accumulate(received_sizes.begin(), received_sizes.end(), int64_t{0}));
    Tensor* received;
    FUSEDREC_TRY(ctx->allocate_output(0, shape, &received));
    const auto* from = static_cast<const char*>(rows.data());
    auto* to = static_cast<char*>(received->data());
    call->enqueue = [=](void* comm, void* stream) mutable {
      for (size_t rank = 0; rank < sizes.size(); ++rank) {
        const size_t bytes = sizes[rank] * row_bytes, received_bytes = received_sizes[rank] * row_bytes;
        if (bytes > 0) FUSEDREC_CALL(ncclSend, from, bytes, kInt8, rank, comm, stream);
        if (received_bytes > 0) FUSEDREC_CALL(ncclRecv, to, received_bytes, kInt8, rank, comm, stream);
        from += bytes;
        to += received_bytes;
      }
      return absl::OkStatus();
    };
    return Start(ctx, call);
  }
};

class NcclSumOp : public NcclOp {
 public:
  using NcclOp::NcclOp;

 protected:
  absl::Status Begin(OpKernelContext* ctx, NcclCall* call) const override {
    const tensorflow::DataType dtype = ctx->input_dtype(0);
    const int type = dtype == tensorflow::DT_FLOAT ? kFloat32 : dtype == tensorflow::DT_DOUBLE ? kFloat64 : kInt64;
    std::vector<std::pair<const Tensor*, Tensor*>> pairs;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      Tensor* sum;
      FUSEDREC_TRY(ctx->allocate_output(i, ctx->input(i).shape(), &sum));
      pairs.emplace_back(&ctx->input(i), sum);
    }
    call->enqueue = [pairs = std::move(pairs), type](void* comm, void* stream) {
      for (const auto& [value, sum] : pairs) {
        if (value->NumElements() == 0) continue;
        FUSEDREC_CALL(ncclAllReduce, value->data(), sum->data(), value->NumElements(), type, kAdd, comm, stream);
      }
      return absl::OkStatus();
    };
    return Start(ctx, call);
  }
};

REGISTER_KERNEL_BUILDER(Name("Fusedrec>NcclAllToAll").Device(tensorflow::DEVICE_CPU), NcclAllToAllOp);
REGISTER_KERNEL_BUILDER(
    Name("Fusedrec>NcclAllToAll").Device(tensorflow::DEVICE_GPU).HostMemory("splits").HostMemory("received_splits"),
    NcclAllToAllOp);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>NcclSum").Device(tensorflow::DEVICE_CPU), NcclSumOp);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>NcclSum").Device(tensorflow::DEVICE_GPU), NcclSumOp);

const char* TextOf(const absl::Status& status) {
  static auto* text = new std::string;
  *text = std::string(status.message());
  return status.ok() ? nullptr : text->c_str();
}

}  // namespace
}  // namespace fusedrec

extern "C" {
// Each returns nullptr, or the text of its failure, valid until the next call.

__attribute__((visibility("default"))) const char* fusedrec_nccl_load(const char* path) {
  return fusedrec::TextOf(fusedrec::Load(path));
}

// Makes the communicator, after the ranks have joined. `id` has 128 bytes: rank 0 writes them, the others read them.
__attribute__((visibility("default"))) const char* fusedrec_nccl_join(char* id) {
  using namespace fusedrec;
  auto* unique = reinterpret_cast<UniqueId*>(id);
  const int error = Mesh::OfProcess()->rank() == 0 ? functions.ncclGetUniqueId(unique) : 0;
  if (error != 0) return TextOf(Failed("ncclGetUniqueId", error));
  communicator = new Communicator(*unique);
  return nullptr;
}
}
