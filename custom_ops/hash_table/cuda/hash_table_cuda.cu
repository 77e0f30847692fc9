#include "hash_table/cuda/hash_table_cuda.h"

#include "hash_table/cuda/table.h"

int fusedrec_table_create(const FusedrecTableTexts* texts, const FusedrecAllocator* allocator,
                          FusedrecDeviceTable** table, void* stream) {
  fusedrec::TableSpec spec;
  if (!FusedrecDeviceTable::Read(*texts, &spec)) return fusedrec::kCudaInvalidValue;
  return FusedrecDeviceTable::Make(spec, texts->chunk_rows, *allocator, table, stream);
}

void fusedrec_table_destroy(FusedrecDeviceTable* table) { delete table; }

int fusedrec_table_lookup(FusedrecDeviceTable* table, const FusedrecMessage* message, int64_t storage, void* rows,
                          int64_t out_rows, int32_t* inverse, int64_t* handles, int64_t* num_rows, void* stream) {
  return table->Lookup(*message, storage, rows, out_rows, inverse, handles, num_rows, stream);
}

int fusedrec_table_find(FusedrecDeviceTable* table, const FusedrecMessage* message, int64_t storage, void* rows,
                        int64_t out_rows, uint32_t* found, void* stream) {
  return table->Find(*message, storage, rows, out_rows, found, false, stream);
}

int fusedrec_table_peek(FusedrecDeviceTable* table, const FusedrecMessage* message, int64_t storage, void* rows,
                        int64_t out_rows, void* stream) {
  return table->Find(*message, storage, rows, out_rows, nullptr, true, stream);
}

int fusedrec_table_apply(FusedrecDeviceTable* table, const int64_t* handles, int64_t num_rows, const int32_t* inverse,
                         int64_t num_ids, const void* grads, int64_t storage, float scale, const fusedrec::Step* step,
                         int32_t* left_out, int64_t* num_left_out, void* stream) {
  return table->Apply(handles, num_rows, inverse, num_ids, grads, storage, scale, *step, left_out, num_left_out,
                      stream);
}

int fusedrec_table_accumulate(FusedrecDeviceTable* table, const int64_t* handles, int64_t num_rows,
                              const int32_t* inverse, int64_t num_ids, const void* grads, int64_t storage, float scale,
                              int begin, int32_t* left_out, int64_t* num_left_out, void* stream) {
  return table->Accumulate(handles, num_rows, inverse, num_ids, grads, storage, scale, begin != 0, left_out,
                           num_left_out, stream);
}

int fusedrec_table_apply_accumulated(FusedrecDeviceTable* table, const fusedrec::Step* step, void* stream) {
  return table->ApplyAccumulated(*step, stream);
}

int fusedrec_table_evict(FusedrecDeviceTable* table, int64_t segment, int64_t count, int64_t* gone, void* stream) {
  return table->Evict(segment, count, gone, stream);
}

int fusedrec_table_remove(FusedrecDeviceTable* table, int64_t segment, const int64_t* ids, int64_t num_ids,
                          int64_t* gone, void* stream) {
  return table->Remove(segment, ids, num_ids, gone, stream);
}

int fusedrec_table_tombstones(FusedrecDeviceTable* table, int64_t segment, const FusedrecIdSink* sink, void* stream) {
  return table->Tombstones(segment, *sink, stream);
}

void fusedrec_table_forget_tombstones(FusedrecDeviceTable* table) { table->ForgetTombstones(); }

int fusedrec_table_candidates(FusedrecDeviceTable* table, int64_t segment, const FusedrecIdSink* sink, void* stream) {
  return table->Candidates(segment, *sink, stream);
}

int fusedrec_table_set_candidates(FusedrecDeviceTable* table, int64_t segment, const int64_t* ids, const int64_t* counts,
                                  int64_t count, void* stream) {
  return table->SetCandidates(segment, ids, counts, count, stream);
}

int fusedrec_table_keys(FusedrecDeviceTable* table, int64_t segment, int64_t lookups, int64_t version, int64_t most,
                        int64_t* ids, int64_t* handles, int64_t* count, void* stream) {
  return table->Keys(segment, lookups, version, most, ids, handles, count, stream);
}

int64_t fusedrec_table_record_bytes(FusedrecDeviceTable* table) { return table->record_bytes(); }

int fusedrec_table_read_records(FusedrecDeviceTable* table, const int64_t* handles, int64_t count, char* records,
                                void* stream) {
  return table->ReadRecords(handles, count, records, stream);
}

int fusedrec_table_write_records(FusedrecDeviceTable* table, int64_t segment, const int64_t* ids, int64_t count,
                                 const char* records, void* stream) {
  std::vector<int64_t> counts(table->segments(), 0);
  if (segment < 0 || segment >= table->segments() || count < 0) return fusedrec::kCudaInvalidValue;
  counts[segment] = count;
  return table->WriteRecords(counts, ids, records, stream);
}

int fusedrec_table_note_trained(FusedrecDeviceTable* table, const FusedrecMessage* message, void* stream) {
  return table->NoteTrained(*message, stream);
}

int fusedrec_table_take_unsynced(FusedrecDeviceTable* table, const FusedrecUnsyncedSink* sink, void* stream) {
  return table->TakeUnsynced(*sink, stream);
}

int64_t fusedrec_table_width(FusedrecDeviceTable* table) { return table->width(); }

int fusedrec_table_read_numbers(FusedrecDeviceTable* table, const int64_t* ids, const int64_t* splits, float* numbers,
                                int64_t out_rows, void* stream) {
  return table->ReadNumbers(ids, splits, numbers, out_rows, stream);
}

int fusedrec_table_merge(FusedrecDeviceTable* table, const FusedrecMerge* merge, void* stream) {
  return table->Merge(*merge, stream);
}

void fusedrec_table_set_clock(FusedrecDeviceTable* table, int64_t clock, int64_t version) {
  table->SetClock(clock, version);
}

int fusedrec_table_clear(FusedrecDeviceTable* table, void* stream) { return table->Clear(stream); }

void fusedrec_table_size(FusedrecDeviceTable* table, int64_t* sizes, FusedrecTableTotals* totals) {
  *totals = table->Size(sizes);
}

void fusedrec_table_statistics(FusedrecDeviceTable* table, int64_t* statistics) { table->Statistics(statistics); }

int64_t fusedrec_table_full_segment(FusedrecDeviceTable* table) { return table->full_segment(); }
