// Records what a delta checkpoint needs: the ids whose rows may have changed, and the ids that left.
//
// # Changed rows
// The header of a row has the version and the lookup that changed it last. Reading all headers takes longer than copying the few rows
// that changed, so a log lists the ids that training lookups and imports touch. It lists each id about once, because the
// header's `last` tells whether the row was touched before. The list is a superset of the changed rows.
//
// A row that a lookup touched has changed, too: its `last` and `count` decide which rows leave. Its gradients may never
// come, so that its version alone would hide it.
//
// A log stops where it cannot stay complete: a list grows too long to be of use, or gradients arrive of a lookup from
// before its beginning. A stopped log covers nothing, and the reader reads all headers.
#pragma once

#include <atomic>

#include "hash_table/cpu/rows/distinct_ids.h"
#include "hash_table/cpu/rows/row_format.h"

namespace fusedrec {

class ChangeLog {
 public:
  // The lists of one shard, by segment, with repeats. The shard's mutex guards them.
  struct Lists {
    IdsBySegment touched, left;

    explicit Lists(int64_t segments = 0) : touched(segments), left(segments) {}
    void Clear() {
      for (std::vector<int64_t>& ids : touched) ids.clear();
      for (std::vector<int64_t>& ids : left) ids.clear();
    }
  };

  // Notes that a lookup or an import touches an id. last: clock at which its row was touched before. num_rows: rows of
  // the segment in this shard.
  void Touch(Lists* lists, int64_t segment, int64_t id, uint32_t last, int64_t num_rows) {
    if (last > clock_.load(std::memory_order_relaxed)) return;
    constexpr size_t kAlwaysKept = 256;
    std::vector<int64_t>& touched = lists->touched[segment];
    if (touched.size() >= kAlwaysKept + num_rows / 4) {
      Stop();
      return;
    }
    touched.push_back(id);
  }
  // Notes that the rows of the lookup of this clock are about to change; 0: no row is.
  void Update(uint32_t clock) {
    if (clock > 0 && clock <= clock_.load(std::memory_order_relaxed)) Stop();
  }
  // Returns whether the lists hold every row that changed after this moment.
  bool Covers(Moment since) const {
    const int64_t clock = clock_.load();
    return clock >= 0 && since.lookups >= clock && since.version >= version_.load();
  }

  void Stop() { clock_.store(-1); }
  // Begins anew; with `is_on` the lists are complete from this moment on. The caller has stopped the log and cleared the
  // lists.
  void Begin(Moment now, bool is_on) {
    version_.store(now.version);
    if (is_on) clock_.store(now.lookups);
  }

 private:
  std::atomic<int64_t> clock_{-1};    // at which the log begins; -1: it is stopped
  std::atomic<uint32_t> version_{0};  // then
};

}  // namespace fusedrec
