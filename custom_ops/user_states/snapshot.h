// A state of a user at one moment, and the key under which caches keep it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/hash.h"
#include "user_states/page_pool.h"

namespace fusedrec {

struct StateKey {
  int64_t user, version;
  bool operator==(const StateKey& other) const { return user == other.user && version == other.version; }
};

struct HashStateKey {
  size_t operator()(const StateKey& key) const {
    return Mix64(Mix64(static_cast<uint64_t>(key.user)) + static_cast<uint64_t>(key.version));
  }
};

// It stays as it is, whatever becomes of the state.
struct StateSnapshot {
  int64_t revision = 0;  // 0: there is no state
  int64_t tokens = 0;
  std::vector<Page> pages;
  std::shared_ptr<const std::vector<char>> of_user;  // the parts, one behind another
};

}  // namespace fusedrec
