// The findings of handles.cuh on the inputs of an update, and on handles of an export.
#pragma once

#include <cstdint>

#include "hash_table/storage.h"

namespace fusedrec {
namespace device_table {

// All bits of all words are set before the kernel; words only become smaller.
struct HandleFacts {
  unsigned oldest, newest;     // smallest clock, and smallest complement of a clock; all bits set: no handle has a row
  unsigned handles_are_sound;  // 0: one names a row that never was
  unsigned handles_are_distinct;  // 0: a row comes twice, in an update
  unsigned inverse_is_sound;   // 0: a number is no handle's
  unsigned grads_are_finite;   // 0: a number is not
  unsigned all_have_sums;      // 0: the row of a handle has no sum (sums.cuh)
};

// Gradients to look at; null: none.
struct Numbers {
  const void* data;
  Storage storage;
  int64_t count;
};

}  // namespace device_table
}  // namespace fusedrec
