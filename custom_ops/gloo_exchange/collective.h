// Named collectives, and the threads that wait for their messages: the base of the ops of this room.
//
// A message is matched by the collective's name, its ranks and the number of the call. Nothing is negotiated. Lengths
// must be equal, too: Gloo refuses a message of another length than its receiver expects (tools/gloo.patch).
//
// A computing thread posts messages. A thread for each collective under way sleeps until its messages have arrived. The
// ops are not stateful, because a function runs stateful ops one after another.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/hash.h"
#include "common/kernel_util.h"
#include "gloo_exchange/mesh.h"

namespace fusedrec {

class RowsReceive;  // of an all-to-all
struct SplitsReceive;

// Calls function(i) for every i < size but `self`. Each rank begins with a different one.
template <typename Function>
void ForOthers(int self, int size, const Function& function) {
  for (int i = 1; i < size; ++i) function((self + i) % size);
}

// A named collective of a set of ranks. Never destroyed.
struct Collective {
  std::string name;
  std::vector<int> ranks;  // ascending
  int index = 0;           // of this rank among them
  uint64_t key = 0;
  std::mutex mutex;
  uint64_t begun = 0;  // calls
  bool running = false;
  // The receive of the next call. It stays if the call is never made, because Gloo's loop may still write to its memory.
  std::shared_ptr<RowsReceive> posted;
  std::shared_ptr<SplitsReceive> next_splits;  // of the call after the last, posted ahead

  int size() const { return static_cast<int>(ranks.size()); }

  // A call has up to kParts messages from one rank to another.
  static constexpr int kParts = 1 << 16;
  uint64_t Slot(int part, uint64_t call) const { return Mix64(key ^ Mix64(kParts * call + part)) | 1ULL << 63; }

  template <typename Function>
  void ForOthers(const Function& function) const {
    fusedrec::ForOthers(index, size(), function);
  }
};

// Checks the numbers of rows for, or from, each rank of a set.
absl::Status RequireRows(const char* name, const Tensor& splits, int64_t size);
absl::Status RequireSplits(const Tensor& rows, const Tensor& splits, int64_t size);

// Runs a function that sleeps, in another thread.
void RunWaiting(std::function<void()> wait);

class ExchangeOp : public tensorflow::AsyncOpKernel {
 public:
  explicit ExchangeOp(OpKernelConstruction* ctx);

 protected:
  // Runs a function that returns a Status or throws an error of Gloo.
  absl::Status Try(const std::function<absl::Status()>& function) const;

  Collective* collective_ = nullptr;
};

// The collective of one call, from its first message to its last.
class RunningCall {
 public:
  ~RunningCall() {
    if (collective_ == nullptr) return;
    std::lock_guard<std::mutex> lock(collective_->mutex);
    collective_->running = false;
  }

  // The caller holds the mutex. A call that fails up to here has not begun: it has sent nothing, and the next one has
  // its number.
  static absl::Status RequireNone(const Collective& collective) {
    if (!collective.running) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "a call begins before the last one has ended. Use another name for each collective of a step.");
  }
  void Begin(Collective* collective) {  // the same
    collective->running = true;
    collective_ = collective;
    number_ = collective->begun++;
  }

  uint64_t number() const { return number_; }

 private:
  Collective* collective_ = nullptr;
  uint64_t number_ = 0;
};

// An op that begins a Call in a computing thread, and finishes it in one that sleeps.
template <typename Call>
class ExchangeCallOp : public ExchangeOp {
 public:
  using ExchangeOp::ExchangeOp;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto call = std::make_shared<Call>();
    const absl::Status begun = Try([&] { return Begin(ctx, call.get()); });
    if (!begun.ok()) return End(ctx, std::move(call), begun, done);
    RunWaiting([this, ctx, done = std::move(done), call = std::move(call)]() mutable {
      const absl::Status finished = Try([&] { return Finish(ctx, call.get()); });
      End(ctx, std::move(call), finished, done);
    });
  }

 protected:
  virtual absl::Status Begin(OpKernelContext* ctx, Call* call) const = 0;
  virtual absl::Status Finish(OpKernelContext* ctx, Call* call) const = 0;  // sleeps

 private:
  // Ends the call before its step goes on, which may free its tensors or begin the next call.
  static void End(OpKernelContext* ctx, std::shared_ptr<Call> call, const absl::Status& status,
                  const DoneCallback& done) {
    call.reset();
    OP_REQUIRES_OK_ASYNC(ctx, status, done);
    done();
  }
};

}  // namespace fusedrec
