// The dynamic embedding table on a GPU.
//
// It has the contract of table.h, with the same rows and the same values as on the CPU. Two things differ. A lookup numbers
// its rows in the order in which their ids first occur in the message. The handle of a row depends on the messages alone.
//
// Keys lie in lines of 64 bytes (lines.cuh), rows in chunks that never move (rows.cuh). At a load of 0.75 the number of
// lines doubles. All memory comes from the caller's allocator, which orders its memory by the stream.
//
// # A training lookup
//   1. Runs: where the ids of each source and segment begin, from the headers of the message.
//   2. Probe (deferred-hash lookup and table probe in one): a known id finds its row in its line. One atomicMax of
//      (attempt << 32 | ~position) writes its position to the meta of the row. That touches the row and deduplicates over
//      the sources: the smallest position of a row in this lookup is its first. Ids without a row meet in a scratch table
//      of positions.
//   3. Number: ballots and a look-back count first positions, and new ids among them.
//   4. One copy of the counts to the host, which makes room: lines, chunks, and evictions at max_rows. All memory is
//      allocated before anything changes. Without memory, the table does not change.
//      With admission, counts of ids without a row are read before, so that only admitted ids are new (admission.cu).
//   5. Commit: new keys go into lines, their rows get initial values, LRU and LFU see the touches.
//   6. Gather: rows are copied in the order received.
// A lookup without new ids has one host round trip and one probe per id.
//
// # Mixed storage
// With hot_after, a lookup also counts in step 3 the rows that it moves between 16 bits and float32. They move ahead of
// step 5 (mixed.cu). A lookup that demotes rows has one more round trip.
#pragma once

#include "common/cuda_api.h"
#include "hash_table/table_limits.h"
#include "hash_table/rules/rule.h"

namespace fusedrec {

constexpr int64_t kDeviceTableMaxIds = int64_t{1} << 30;   // of one message
constexpr int64_t kDeviceTableMaxRows = int64_t{1} << 31;  // of one table

constexpr int kDeviceOutOfMemory = 2;  // cudaErrorMemoryAllocation; also: the table has kDeviceTableMaxRows rows
constexpr int kDeviceTableFull = -1;   // max_rows, and not enough rows may leave
constexpr int kDeviceStale = -2;       // rows of the lookup whose gradients come have left since
constexpr int kDeviceBadHandle = -3;   // not of this table, or not all of one lookup
constexpr int kDeviceBadInverse = -4;  // names a row beyond the handles
constexpr int kDeviceAbsent = -5;      // an id that the buffer does not know (buffer_cuda.h), or another message
constexpr int kDeviceNotWritten = -6;  // rows of the batch before are still to be written back
constexpr int kDeviceWaiting = -7;     // rows may not be removed, because gradients wait for their update
constexpr int kDeviceDoubled = -8;     // a handle of an update, or an id of an import or a merge, comes twice
constexpr int kDeviceClockEnds = -9;   // the table has had kMostClock lookups
constexpr int kDeviceMore = -10;       // there is more than the caller has room for

}  // namespace fusedrec

struct FusedrecDeviceTable;

// Takes ids [count] and their numbers, host, which last for the call; numbers null: ids alone.
struct FusedrecIdSink {
  void* context;
  void (*take)(void* context, const int64_t* ids, const int64_t* numbers, int64_t count);
};

// Device memory for the answer of fusedrec_table_take_unsynced: message [entries], headers [ids]. allocate answers 0, or
// another number where there is none.
struct FusedrecUnsyncedSink {
  void* context;
  int (*allocate)(void* context, int64_t entries, int64_t ids, int64_t** message, int64_t** headers);
};

// The common state of replicas, as the arguments of Replicas::Merge.
struct FusedrecMerge {
  const int64_t *left, *left_splits;  // device; host, [segments + 1]
  const int64_t *ids, *id_splits;     // the same; ids are distinct
  const float* numbers;               // device, [ids, width]
  const int64_t* headers;             // device, [ids]
  int64_t step;
};

// What a table is made of: the text of each segment (options.h), host.
struct FusedrecTableTexts {
  const char* const* texts;
  int64_t segments;
  int64_t chunk_rows;  // a power of two, at least 32
};

// A message as the all-to-all delivers it (rank_partition.h).
struct FusedrecMessage {
  const int64_t* entries;          // device, [sum of received_splits]
  const int32_t* received_splits;  // host, [ranks], each at least the number of segments
  int64_t ranks;
  // Fingerprint of the ids (common/hash.h), for a lookup of a batch buffer (buffer_cuda.h); 0: not compared.
  uint64_t fingerprint = 0;
};

FUSEDREC_CUDA_API int fusedrec_table_create(const FusedrecTableTexts* texts, const FusedrecAllocator* allocator,
                                            FusedrecDeviceTable** table, void* stream);
FUSEDREC_CUDA_API void fusedrec_table_destroy(FusedrecDeviceTable* table);

// Training form. Waits once, for the counts.
//   storage   of `rows`
//   rows      [out_rows >= V, dim]  device, out; zeros after V
//   inverse   [V]  device, out: number of each id's row
//   handles   [V]  device, out: the first *num_rows are written: lookup << 32 | row, or -1 where admission refuses the id
//   num_rows  host, out
//   window    lookups, this one included, whose gradients are to come: their rows stay until the next lookup
// rows may be null, with out_rows 0.
// kCudaInvalidValue when headers do not fit their message; kDeviceOutOfMemory, kDeviceTableFull: nothing has changed, but
// for rows whose time to live is over at this lookup, which have left.
FUSEDREC_CUDA_API int fusedrec_table_lookup(FusedrecDeviceTable* table, const FusedrecMessage* message, int64_t window,
    int64_t storage, void* rows, int64_t out_rows, int32_t* inverse, int64_t* handles, int64_t* num_rows, void* stream);

// Inference form: inserts and touches nothing; an id without a row has its initial value. Waits for the headers.
// window: the rows that the next fusedrec_table_lookup of this message and window would answer; 0: inference.
// rows may be null; found [V], device, out, may be null: row of each id, 0xffffffff without.
FUSEDREC_CUDA_API int fusedrec_table_find(FusedrecDeviceTable* table, const FusedrecMessage* message, int64_t window,
                                          int64_t storage, void* rows, int64_t out_rows, uint32_t* found, void* stream);

// Gradients of a lookup, or of one part of it.
struct FusedrecGradients {
  const int64_t* handles;  // device, [num_rows], of fusedrec_table_lookup
  int64_t num_rows;
  const int32_t* inverse;  // device, [num_ids], of fusedrec_table_lookup
  int64_t num_ids;
  const void* grads;  // device, [>= num_ids, dim], of `storage`; multiplied by `scale`
  int64_t storage;
  float scale;
};

// Sums gradients of equal rows in the order received and applies the table's rule in place.
//   left_out      [num_rows]  device, out: places in handles, in any order, of rows whose sum is not finite: they and their
//                 slots stay as they are
//   num_left_out  host, out: how many; 0 where all gradients are finite and a sum of them is not
// A row without a gradient stays as it is. Waits once for the facts of handles and inverse, and once more where a gradient
// is not finite. After kDeviceStale, kDeviceBadHandle, kDeviceDoubled, kDeviceBadInverse and kDeviceOutOfMemory nothing has
// changed.
FUSEDREC_CUDA_API int fusedrec_table_apply(FusedrecDeviceTable* table, const FusedrecGradients* gradients,
    const fusedrec::Step* step, int32_t* left_out, int64_t* num_left_out, void* stream);

// The same in two parts: fusedrec_table_accumulate adds the sum over one lookup, or one part of it, to a sum per row, which
// fusedrec_table_apply_accumulated applies. Rows of these lookups stay until then. left_out: places of rows whose sum ceases
// to be finite. `begin`, not 0, drops earlier sums. Waits and answers as fusedrec_table_apply.
FUSEDREC_CUDA_API int fusedrec_table_accumulate(FusedrecDeviceTable* table, const FusedrecGradients* gradients, int begin,
                                                int32_t* left_out, int64_t* num_left_out, void* stream);
FUSEDREC_CUDA_API int fusedrec_table_apply_accumulated(FusedrecDeviceTable* table, const fusedrec::Step* step,
                                                       void* stream);

// Takes out the `count` rows of a segment that its policy ranks lowest, rows of the last `window` lookups apart; *gone,
// host, out: how many could go. Waits.
FUSEDREC_CUDA_API int fusedrec_table_evict(FusedrecDeviceTable* table, int64_t segment, int64_t count, int64_t* gone,
                                           void* stream);
// Takes out ids [num_ids], device. *gone, host, out: how many had a row. Waits. kDeviceWaiting: nothing has changed.
FUSEDREC_CUDA_API int fusedrec_table_remove(FusedrecDeviceTable* table, int64_t segment, const int64_t* ids,
                                            int64_t num_ids, int64_t* gone, void* stream);

// Ids of a segment that left since the last fusedrec_table_forget_tombstones and have no row, ascending. Waits.
FUSEDREC_CUDA_API int fusedrec_table_tombstones(FusedrecDeviceTable* table, int64_t segment, const FusedrecIdSink* sink,
                                                void* stream);
FUSEDREC_CUDA_API void fusedrec_table_forget_tombstones(FusedrecDeviceTable* table);

// Ids of a segment that wait for admission and the lookups that brought them, in the order of checkpoints. Waits.
FUSEDREC_CUDA_API int fusedrec_table_candidates(FusedrecDeviceTable* table, int64_t segment, const FusedrecIdSink* sink,
                                                void* stream);
// Sets the counts of ids [count], host, each in [1, 2^31). Without admission, nothing. Waits.
FUSEDREC_CUDA_API int fusedrec_table_set_candidates(FusedrecDeviceTable* table, int64_t segment, const int64_t* ids,
                                                    const int64_t* counts, int64_t count, void* stream);

// Checkpoints, in the format of row_records.h.
// Ids of a segment whose rows changed after the update `version`, or were touched after the training lookup `lookups`
// (both 0: all), in the order of rows, and their rows: device, out, with room for `most`. *count, host, out: how many there
// are. kDeviceMore: more than `most`; lookups may have added some since the caller asked for the size. Waits.
FUSEDREC_CUDA_API int fusedrec_table_keys(FusedrecDeviceTable* table, int64_t segment, int64_t lookups, int64_t version,
                                          int64_t most, int64_t* ids, int64_t* handles, int64_t* count, void* stream);
// records [count * record_bytes], device, of rows that fusedrec_table_keys gave; kDeviceBadHandle where there was never
// such a row. Waits.
FUSEDREC_CUDA_API int fusedrec_table_read_records(FusedrecDeviceTable* table, const int64_t* handles, int64_t count,
                                                  char* records, void* stream);
// Inserts or overwrites distinct ids [count], device; max_rows does not hold for them. Handles of earlier lookups end,
// because their gradients are of other rows. kDeviceDoubled: nothing has changed. Waits.
FUSEDREC_CUDA_API int fusedrec_table_write_records(FusedrecDeviceTable* table, int64_t segment, const int64_t* ids,
                                                   int64_t count, const char* records, void* stream);
// Replicas that are averaged, as replicas.h has them; only with `averaged`. All of them wait.
FUSEDREC_CUDA_API int fusedrec_table_note_trained(FusedrecDeviceTable* table, const FusedrecMessage* message, void* stream);
// Ids of a segment that were trained come in the order of rows, ids that left ascending.
FUSEDREC_CUDA_API int fusedrec_table_take_unsynced(FusedrecDeviceTable* table, const FusedrecUnsyncedSink* sink,
                                                   void* stream);
// ids [n], device; splits [segments + 1], host; numbers [out_rows >= n, width], device, out: zeros after n. Any table.
FUSEDREC_CUDA_API int fusedrec_table_read_numbers(FusedrecDeviceTable* table, const int64_t* ids, const int64_t* splits,
                                                  float* numbers, int64_t out_rows, void* stream);
// kDeviceOutOfMemory: nothing has changed. kDeviceTableFull: the rows are merged, and more than max_rows stay.
FUSEDREC_CUDA_API int fusedrec_table_merge(FusedrecDeviceTable* table, const FusedrecMerge* merge, void* stream);

FUSEDREC_CUDA_API void fusedrec_table_set_clock(FusedrecDeviceTable* table, int64_t clock, int64_t version);
FUSEDREC_CUDA_API int fusedrec_table_clear(FusedrecDeviceTable* table, void* stream);

struct FusedrecTableTotals {
  int64_t clock, version;         // lookups and updates so far
  int64_t record_bytes, width;    // of a row's record; numbers of a row and its slots
  int64_t full_segment;           // that the last kDeviceTableFull was about
  int64_t line_bytes, chunk_bytes;
  int64_t cold_bytes, cold_rows;  // of the 16-bit rows of a mixed table; chunk_bytes are all others
};
// statistics [segments, 6], host, out, may be null: ids that have a row; since the table was made or cleared, distinct rows
// that training lookups found, rows that they made, rows that were evicted, ids that admission refused; then the ids that
// it counts.
FUSEDREC_CUDA_API void fusedrec_table_statistics(FusedrecDeviceTable* table, int64_t* statistics,
                                                 FusedrecTableTotals* totals);
