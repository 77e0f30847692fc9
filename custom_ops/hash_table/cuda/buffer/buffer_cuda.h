// Rows in host memory, the rows of two batches on a GPU: for tables larger than the device (NestPipe, section IV-B); and a
// pool of hot rows, which outlive their batches there.
//
// The active buffer holds the rows of the current batch. It is a table (hash_table_cuda.h) that knows only the ids of this
// batch; lookups and updates go there. Meanwhile the rows of the next batch are copied from host memory. The copies of
// rows that both batches have are stale. When the next batch begins, its rows go into the other buffer. One kernel
// finds the keys that both buffers hold, and another copies their rows from the active buffer. Then the buffers change
// roles, and the rows of the previous batch go back to host memory.
//   step                     active          prefetched      host memory
//   prefetch(t + 1)          rows of t       rows of t + 1   read, but for rows of t - 1
//   write_back               rows of t       rows of t + 1   gets the rows of t - 1
//   prefetch(t + 1, more)    rows of t       rows of t + 1   read, with the rows of t - 1
//   lookups and updates of t trained
//   advance                  rows of t + 1                   rows of both batches are copied on the device
//
// Every batch therefore sees all updates before it. The rows equal a table's without buffers, bit for bit.
//
// Rows travel as records (row_records.h), in the order of the ids of the call, so the host puts them back without a search.
// The host decides which rows exist, which are new and which leave. New rows come with their initial record.
//
// # The pool
// It holds up to hot_rows records in numbered slots. The host decides which rows lie where. A batch takes its hot rows from
// their slots, so these do not travel. The advance to the next batch moves rows between the batch that ends and the pool:
//   1. Rows of the next batch are read from their slots.
//   2. Rows whose slots others need go to the records that write_back returns.
//   3. Hot rows of the batch that ends are written to their slots.
// A slot is newer than host memory until the host has read it. While its row is in the active buffer, the buffer is newer.
//
// # Streams
// Copies to the device and copies to the host have a stream and page-locked memory of their own each, so that they run
// beside each other and beside the work on the caller's stream. advance begins the copy of the rows that leave, and
// write_back waits for it. prefetch returns before its copy ends, and advance lets the caller's stream wait for it. All
// other work is on the caller's stream (`stream`, the same in all calls). It moves rows inside the device, so advance
// delays a lookup little.
#pragma once

#include "hash_table/cuda/hash_table_cuda.h"

struct FusedrecDeviceBuffer;

// Rows of a batch that lie in the pool; host.
struct FusedrecHotRows {
  const int64_t *ids, *segment_splits;  // distinct, none of them elsewhere in the call; as in prefetch
  const int64_t* slots;                 // of each id
};

// Moves at the end of a batch, of its rows by their place in the order of write_back, and of slots; host. A row goes to
// one place at most, and a slot is dropped once and kept once at most.
struct FusedrecPoolMoves {
  // leaving: rows that write_back returns | kept: rows | their slots | dropped: slots that write_back returns, too
  const int64_t* numbers;
  int64_t leaving, kept, dropped;  // how many
};

// Both buffers grow with the batches; the pool has its memory from the beginning. The texts have
// tier.host_rows; tier.hot_rows are the pool's, and their limits are left to host memory.
FUSEDREC_CUDA_API int fusedrec_buffer_create(const FusedrecTableTexts* texts, const FusedrecAllocator* allocator,
                                             FusedrecDeviceBuffer** buffer, void* stream);
FUSEDREC_CUDA_API void fusedrec_buffer_destroy(FusedrecDeviceBuffer* buffer);

// Page-locked memory for records that go to the device: at least `bytes`, until the next call, which waits for the copies
// from it. kDeviceOutOfMemory.
FUSEDREC_CUDA_API int fusedrec_buffer_host_memory(FusedrecDeviceBuffer* buffer, int64_t bytes, char** memory);

// The rows of the batch under way, for fusedrec_table_lookup, _find and _apply until the next advance. A lookup of an id
// that the batch does not know answers kDeviceAbsent and changes nothing. Clock and version go from batch to batch;
// fusedrec_table_set_clock sets others after an advance.
FUSEDREC_CUDA_API FusedrecDeviceTable* fusedrec_buffer_active(FusedrecDeviceBuffer* buffer);

// Sets the version of the active buffer, which its next update counts on from. Handles stay valid.
FUSEDREC_CUDA_API void fusedrec_buffer_set_version(FusedrecDeviceBuffer* buffer, int64_t version);

// Copies rows of the next batch to the device. They replace those of an earlier call with the same `more`, and all of them
// without `more`. Page-locked records are read until the next host_memory or advance.
//   more            whether these are further rows of the batch of the last prefetch; hot is then null
//   ids             host, distinct, grouped by segment
//   segment_splits  [segments + 1]  host
//   records         host, [ids, record_bytes]
//   hot             further rows, which are read from the pool when the batch begins; may be null: none
// kDeviceOutOfMemory: nothing has changed.
FUSEDREC_CUDA_API int fusedrec_buffer_prefetch(FusedrecDeviceBuffer* buffer, bool more, const int64_t* ids,
    const int64_t* segment_splits, const char* records, const FusedrecHotRows* hot, void* stream);

// Begins the next batch: takes the prefetched rows, refreshes the rows that both batches want, and switches roles.
//   late_ids, late_splits, late_records  host, as in prefetch: rows that were not prefetched, or have become others since,
//                                        but for updates of the batch under way; late_splits may be null: there are none
//   moves                                host, may be null: all rows of the batch under way leave
// kCudaInvalidValue: ids of one call are not distinct. kDeviceNotWritten: write_back has not been called since the last
// advance. kDeviceOutOfMemory. After these, the active buffer and the pool are what they were, and the caller prefetches
// the next batch again. Waits.
FUSEDREC_CUDA_API int fusedrec_buffer_advance(FusedrecDeviceBuffer* buffer, const int64_t* late_ids,
    const int64_t* late_splits, const char* late_records, const FusedrecPoolMoves* moves, void* stream);

// The following three give the address of records [rows, record_bytes], in page-locked memory, until the next call of one
// of them or of advance. They wait for the copy.
//
// Records of the batch before the last advance. Without moves those of all its rows in the order of its ids: those of
// prefetch, the further ones, the hot ones, then the late ones that were not among them. With moves those of the leaving
// rows, then those of the dropped slots.
FUSEDREC_CUDA_API int fusedrec_buffer_write_back(FusedrecDeviceBuffer* buffer, const char** records);

// All records of the batch under way, which stays. kDeviceNotWritten: the batch before it is to go first.
// kDeviceOutOfMemory.
FUSEDREC_CUDA_API int fusedrec_buffer_read_active(FusedrecDeviceBuffer* buffer, const char** records, void* stream);

// Records of slots [count], host. kDeviceOutOfMemory. kDeviceNotWritten: as in read_active.
FUSEDREC_CUDA_API int fusedrec_buffer_read_hot(FusedrecDeviceBuffer* buffer, const int64_t* slots, int64_t count,
                                               const char** records, void* stream);

// Forgets all rows of batches, also the rows that wait to be written back.
FUSEDREC_CUDA_API int fusedrec_buffer_drop(FusedrecDeviceBuffer* buffer, void* stream);

// rows [3], host, out: numbers of rows in the active buffer, of rows that wait to be written back, of prefetched rows, hot
// ones included.
FUSEDREC_CUDA_API void fusedrec_buffer_rows(FusedrecDeviceBuffer* buffer, int64_t* rows);
