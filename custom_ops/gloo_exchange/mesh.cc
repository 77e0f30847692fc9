#include "gloo_exchange/mesh.h"

#include <pthread.h>

#include <cstring>
#include <functional>
#include <thread>

#include "gloo/common/error.h"
#include "gloo/transport/pair.h"
#include "gloo/transport/tcp/device.h"

namespace fusedrec {
namespace {

constexpr uint64_t kWatchSlot = 0;  // slots of messages have their highest bit set
// A slow rank is no error, and the watchdog of Python ends a job with a silent one.
constexpr std::chrono::hours kNoLimit{24 * 365};
constexpr std::chrono::seconds kToTell{1};  // limit of a word about a lost rank, which follows rows that are being sent

Mesh* listening = nullptr;
Mesh* connected = nullptr;

}  // namespace

Mesh* Mesh::OfProcess() { return connected; }

Mesh::Mesh(const std::string& interface, int rank, int size, std::chrono::milliseconds connect_within)
    : lost_by_rank_(size, -1) {
  gloo::transport::tcp::attr attr;
  attr.iface = interface;
  attr.ai_family = AF_UNSPEC;
  context_ = gloo::transport::tcp::CreateDevice(attr)->createContext(rank, size);
  context_->setTimeout(connect_within);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) context_->createPair(peer);
  }
}

std::string Mesh::Addresses() const {
  std::vector<std::vector<char>> parts(context_->size);
  size_t length = 0;
  for (int peer = 0; peer < context_->size; ++peer) {
    if (peer == rank()) continue;
    parts[peer] = context_->getPair(peer)->address().bytes();
    length = parts[peer].size();
  }
  parts[rank()].resize(length);
  std::string all;
  for (const std::vector<char>& part : parts) all.append(part.begin(), part.end());
  return all;
}

void Mesh::Connect(const std::string& addresses) {
  const size_t size = context_->size, length = addresses.size() / (size * size);
  for (size_t peer = 0; peer < size; ++peer) {
    if (static_cast<int>(peer) == rank()) continue;
    const char* address = addresses.data() + (peer * size + rank()) * length;
    context_->getPair(peer)->connect(std::vector<char>(address, address + length));
  }
  context_->setTimeout(kNoLimit);
  watched_ = Buffer(lost_by_rank_.data(), lost_by_rank_.size() * sizeof(int32_t));
  for (size_t peer = 0; peer < size; ++peer) {
    if (static_cast<int>(peer) != rank()) watched_->recv(peer, kWatchSlot, peer * sizeof(int32_t), sizeof(int32_t));
  }
  std::thread([this] { Watch(); }).detach();
}

void Mesh::Watch() {
  pthread_setname_np(pthread_self(), "exchange watch");
  int lost = -1;
  bool has_said_so = false;  // the lost rank itself, which still runs and names the cause to all
  std::string reason = "a third rank has said so (gloo/)";
  try {
    if (!watched_->waitRecv()) {  // Fail() ends the wait
      std::lock_guard<std::mutex> lock(mutex_);
      lost = rank();
      has_said_so = true;
      reason = own_failure_;
    }
  } catch (const gloo::IoException& error) {
    lost = error.rank;
    reason = error.what();
  }
  // A rank that has lost another one says so and closes its connections, which is no loss of itself.
  for (int peer = 0; peer < size() && lost != rank(); ++peer) {
    if (lost_by_rank_[peer] < 0) continue;
    lost = lost_by_rank_[peer] % size();
    has_said_so = lost_by_rank_[peer] >= size();
  }
  if (has_said_so && lost != rank()) reason = "it has said so itself (gloo/)";
  int32_t word = has_said_so ? lost + size() : lost;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    cause_ = "the exchange has ended at rank " + std::to_string(lost) + ": " + reason;
  }
  failed_.notify_all();
  std::vector<GlooBuffer> words;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank() || peer == lost) continue;
    words.push_back(Buffer(&word, sizeof(word)));
    try {
      words.back()->send(peer, kWatchSlot, 0, sizeof(word));
    } catch (const gloo::IoException&) {  // it is lost, too
      words.pop_back();
    }
  }
  // A wait that reaches its limit closes all connections of a context.
  words.push_back(Buffer(nullptr, 0));  // for which nothing is sent
  for (const GlooBuffer& word : words) {
    try {
      word->waitSend(nullptr, word == words.back() ? std::chrono::milliseconds(1) : kToTell);
    } catch (const gloo::IoException&) {
    }
  }
}

void Mesh::Fail(const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    own_failure_ = reason;
  }
  watched_->abortWaitRecv();
}

std::string Mesh::OwnFailure() {
  std::lock_guard<std::mutex> lock(mutex_);
  return own_failure_;
}

std::string Mesh::Cause(std::chrono::seconds within) {
  std::unique_lock<std::mutex> lock(mutex_);
  failed_.wait_for(lock, within, [this] { return !cause_.empty(); });
  return cause_;
}

namespace {

const char* TextOfFailure(const std::function<void()>& function) {
  static auto* text = new std::string;
  try {
    function();
    return nullptr;
  } catch (const std::exception& error) {
    *text = error.what();
    return text->c_str();
  }
}

}  // namespace
}  // namespace fusedrec

const char* fusedrec_exchange_listen(const char* interface, int rank, int size, int64_t connect_within_ms, char* out,
                                     int64_t room, int64_t* used) {
  return fusedrec::TextOfFailure([&] {
    using fusedrec::listening;
    listening = new fusedrec::Mesh(interface, rank, size, std::chrono::milliseconds(connect_within_ms));
    const std::string addresses = listening->Addresses();
    *used = static_cast<int64_t>(addresses.size());
    if (*used <= room) std::memcpy(out, addresses.data(), addresses.size());
  });
}

const char* fusedrec_exchange_connect(const char* addresses, int64_t bytes) {
  return fusedrec::TextOfFailure([&] {
    fusedrec::listening->Connect(std::string(addresses, static_cast<size_t>(bytes)));
    fusedrec::connected = fusedrec::listening;
  });
}

const char* fusedrec_exchange_own_failure() {
  static auto* text = new std::string;
  *text = fusedrec::connected->OwnFailure();
  return text->empty() ? nullptr : text->c_str();
}
