// Connections of this process to all other ranks, over Gloo's TCP transport.
//
// A message finds its receiver by a slot, which both ranks compute; nothing is negotiated. Gloo's loop, one thread, reads
// and writes the sockets. A receiver announces its buffer, and the sender's payload follows the announcement.
//
// One thread watches all connections. When it sees the first end of one, it tells the other ranks which rank is lost and
// closes all connections, so that every call under way on any rank ends, and with the same cause.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gloo/transport/context.h"
#include "gloo/transport/unbound_buffer.h"

namespace fusedrec {

using GlooBuffer = std::unique_ptr<gloo::transport::UnboundBuffer>;

class Mesh {
 public:
  // Returns the mesh of this process; nullptr before fusedrec_exchange_connect. Never destroyed, as its threads never end.
  static Mesh* OfProcess();

  // Listens for every other rank at a network interface, or, with an empty name, at the address of the host's name.
  Mesh(const std::string& interface, int rank, int size, std::chrono::milliseconds connect_within);

  int rank() const { return context_->rank; }
  int size() const { return context_->size; }

  // The addresses at which this rank listens for each rank, all of one length; zeros for itself.
  std::string Addresses() const;

  // Connects to all ranks. `addresses`: Addresses() of all ranks, in rank order.
  void Connect(const std::string& addresses);

  // The memory must live as long as the buffer.
  GlooBuffer Buffer(void* data, size_t bytes) { return context_->createUnboundBuffer(data, bytes); }

  // Ends the exchange on all ranks, which hear that this one is lost. Returns at once.
  void Fail(const std::string& reason);

  // Returns the reason that Fail() has had, or "".
  std::string OwnFailure();

  // Returns which rank is lost and why, or "" if that is not known in time. When a buffer has thrown, it is very soon.
  std::string Cause(std::chrono::seconds within = std::chrono::seconds(5));

 private:
  void Watch();

  std::shared_ptr<gloo::transport::Context> context_;
  std::vector<int32_t> lost_by_rank_;  // what each rank says: -1, or a lost rank, plus size() if that has said so itself
  GlooBuffer watched_;                 // receives into lost_by_rank_
  std::mutex mutex_;                   // of the next three
  std::condition_variable failed_;
  std::string cause_, own_failure_;
};

}  // namespace fusedrec

extern "C" {
// Each returns nullptr, or the text of its failure, valid until the next call.

// Creates the mesh, and writes its Addresses() to `out` if they fit; *used is their size.
__attribute__((visibility("default"))) const char* fusedrec_exchange_listen(
    const char* interface, int rank, int size, int64_t connect_within_ms, char* out, int64_t room, int64_t* used);
__attribute__((visibility("default"))) const char* fusedrec_exchange_connect(const char* addresses, int64_t bytes);

// Returns why this rank has ended the exchange, or nullptr.
__attribute__((visibility("default"))) const char* fusedrec_exchange_own_failure();
}
