#include "gloo_exchange/collective.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <numeric>
#include <thread>

#include "gloo/common/error.h"

namespace fusedrec {
namespace {

// Threads that wait, as many as collectives are under way.
class Waiters {
 public:
  static Waiters& OfProcess() {
    static auto* waiters = new Waiters;  // its threads never end
    return *waiters;
  }

  void Run(std::function<void()> wait) {
    std::lock_guard<std::mutex> lock(mutex_);
    waits_.push_back(std::move(wait));
    if (idle_ < waits_.size()) {
      std::thread([this] { Loop(); }).detach();
    } else {
      wake_.notify_one();
    }
  }

 private:
  void Loop() {
    pthread_setname_np(pthread_self(), "exchange wait");
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      wake_.wait(lock, [this] { return !waits_.empty(); });
      --idle_;
      std::function<void()> wait = std::move(waits_.front());
      waits_.pop_front();
      lock.unlock();
      wait();
      wait = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> waits_;
  size_t idle_ = 0;
};

Collective* CollectiveOf(const std::string& name, const std::vector<int>& ranks) {
  static auto* mutex = new std::mutex;
  static auto* collectives = new std::map<std::pair<std::string, std::vector<int>>, Collective>;
  std::lock_guard<std::mutex> lock(*mutex);
  Collective& collective = (*collectives)[{name, ranks}];
  if (collective.ranks.empty()) {
    collective.name = name;
    collective.ranks = ranks;
    const auto self = std::find(ranks.begin(), ranks.end(), Mesh::OfProcess()->rank());
    collective.index = static_cast<int>(self - ranks.begin());
    for (const char letter : name) collective.key = Mix64(collective.key + static_cast<uint8_t>(letter) + 1);
    for (const int rank : ranks) collective.key = Mix64(collective.key + rank + 1);
  }
  return &collective;
}

}  // namespace

absl::Status RequireRows(const char* name, const Tensor& splits, int64_t size) {
  FUSEDREC_TRY(RequireRank(name, splits, 1));
  if (splits.NumElements() != size) {
    return Invalid(name, " must have one entry for each of ", size, " ranks, got ", splits.NumElements(),
                   ". Use the splits of this set of ranks.");
  }
  for (const int32_t rows : In<int32_t>(splits)) {
    if (rows < 0) return Invalid(name, " must not be negative, got ", rows, ". Use numbers of rows.");
  }
  return absl::OkStatus();
}

absl::Status RequireSplits(const Tensor& rows, const Tensor& splits, int64_t size) {
  FUSEDREC_TRY(RequireRows("splits", splits, size));
  const auto blocks = In<int32_t>(splits);
  const int64_t total = std::accumulate(blocks.begin(), blocks.end(), int64_t{0});
  if (total <= rows.dim_size(0)) return absl::OkStatus();
  return Invalid("splits must have a sum of at most ", rows.dim_size(0), ", the number of rows, got ", total,
                 ". Use numbers of rows.");
}

void RunWaiting(std::function<void()> wait) { Waiters::OfProcess().Run(std::move(wait)); }

ExchangeOp::ExchangeOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
  std::string name;
  std::vector<int> ranks;
  OP_REQUIRES_OK(ctx, ctx->GetAttr("collective", &name));
  OP_REQUIRES_OK(ctx, ctx->GetAttr("ranks", &ranks));
  OP_REQUIRES(ctx, Mesh::OfProcess() != nullptr,
              absl::FailedPreconditionError("The ranks have not joined. Use tf_fusedrec.init(exchange=\"gloo\")."));
  collective_ = CollectiveOf(name, ranks);
}

absl::Status ExchangeOp::Try(const std::function<absl::Status()>& function) const {
  std::string cause;
  try {
    const absl::Status status = function();
    if (status.ok()) return status;
    return absl::Status(status.code(), absl::StrCat("collective '", collective_->name, "': ", status.message()));
  } catch (const gloo::IoException& error) {
    cause = Mesh::OfProcess()->Cause();
    if (cause.empty()) cause = error.what();
  } catch (const std::exception& error) {
    cause = error.what();
  }
  return absl::InternalError(absl::StrCat("collective '", collective_->name, "': ", cause));
}

}  // namespace fusedrec
