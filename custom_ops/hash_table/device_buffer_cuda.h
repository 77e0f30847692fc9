// Rows in host memory, those of two batches on a GPU: for tables larger than the device (NestPipe, section IV-B).
//
// The active buffer holds the rows of the batch that is trained: lookups and updates are those of a table
// (hash_table_cuda.h) which knows these ids alone. Meanwhile the prefetch buffer is filled with the rows of the next
// batch, as host memory has them: those that both batches want are stale there. So before the next batch begins, a kernel
// finds the keys that both buffers hold, another copies their rows from the active buffer, on the device; then the two
// change roles, and the rows of the batch that was trained go back to host memory while the next one is.
//
//   step                     active          prefetch        host memory
//   prefetch(t + 1)          rows of t       rows of t + 1   read: all up to t - 1 is written back
//   lookups and updates of t trained
//   advance                  rows of t + 1   rows of t       rows that both hold: copied on the device
//   write_back                               (empty)         rows of t
//
// So every batch sees all updates before it: the rows are those of a table without buffers, bit for bit.
//
// Rows travel as records (records.cc) and in the order of the ids that were told: the host needs no search to put them
// back. Which rows there are, which are new and which leave is the host's to say; new ones come with their initial record.
//
// prefetch and write_back may run on another stream and another thread than lookups and updates: they wait for their own
// work before they come back. advance must be behind all of the batch before it.
#ifndef FUSEDREC_HASH_TABLE_DEVICE_BUFFER_CUDA_H_
#define FUSEDREC_HASH_TABLE_DEVICE_BUFFER_CUDA_H_

#include "hash_table/hash_table_cuda.h"

struct FusedrecDeviceBuffer;

// Memory for twice `capacity` rows is taken at once. Of the spec, max_rows, eviction and ttl must be 0.
FUSEDREC_CUDA_API int fusedrec_buffer_create(const FusedrecTableSpec* spec, int64_t capacity,
                                             const FusedrecAllocator* allocator, FusedrecDeviceBuffer** buffer,
                                             void* stream);
FUSEDREC_CUDA_API void fusedrec_buffer_destroy(FusedrecDeviceBuffer* buffer);

// The rows of the batch under way, for fusedrec_table_lookup, _find and _apply until the next advance. A lookup of an id
// that the batch was not told of answers kDeviceAbsent and changes nothing. Clock and version go from batch to batch;
// after a restart fusedrec_table_set_clock gives them.
FUSEDREC_CUDA_API FusedrecDeviceTable* fusedrec_buffer_active(FusedrecDeviceBuffer* buffer);

// Rows of the next batch, in the place of those that an earlier call named for it.
//
//   ids             host, distinct, grouped by segment
//   segment_splits  [segments + 1]  host
//   records         host, pinned for speed, [ids, record_bytes]
// kCudaInvalidValue: segment_splits do not run up from 0, or ids are not distinct. kDeviceTableFull: more ids than the
// capacity. kDeviceNotWritten: write_back has not been called since the last advance. kDeviceOutOfMemory. In all these
// cases the active buffer and host memory are what they were. Waits.
FUSEDREC_CUDA_API int fusedrec_buffer_prefetch(FusedrecDeviceBuffer* buffer, const int64_t* ids,
                                               const int64_t* segment_splits, const char* records, void* stream);

// The next batch begins: refreshes the rows that both hold, and switches roles. shared, host, out, may be null: how many
// those are; then it waits.
FUSEDREC_CUDA_API int fusedrec_buffer_advance(FusedrecDeviceBuffer* buffer, int64_t* shared, void* stream);

// Records of the batch before, in the order of its ids: [rows, record_bytes], host, out. Waits.
FUSEDREC_CUDA_API int fusedrec_buffer_write_back(FusedrecDeviceBuffer* buffer, char* records, void* stream);

// rows [3], host, out: of the active buffer, those that wait to be written back, those prefetched.
FUSEDREC_CUDA_API void fusedrec_buffer_rows(FusedrecDeviceBuffer* buffer, int64_t* rows);

#endif  // FUSEDREC_HASH_TABLE_DEVICE_BUFFER_CUDA_H_
