#include "hash_table/hash_table_cuda.h"

#include "hash_table/device_table.h"

int fusedrec_table_create(const FusedrecTableSpec* spec, const FusedrecAllocator* allocator,
                          FusedrecDeviceTable** table, void* stream) {
  return FusedrecDeviceTable::Make(*spec, *allocator, table, stream);
}

void fusedrec_table_destroy(FusedrecDeviceTable* table) { delete table; }

int fusedrec_table_lookup(FusedrecDeviceTable* table, const FusedrecMessage* message, int64_t storage, void* rows,
                          int64_t out_rows, int32_t* inverse, int64_t* handles, int64_t* num_rows, void* stream) {
  return table->Lookup(*message, storage, rows, out_rows, inverse, handles, num_rows, stream);
}

int fusedrec_table_find(FusedrecDeviceTable* table, const FusedrecMessage* message, int64_t storage, void* rows,
                        int64_t out_rows, uint32_t* found, void* stream) {
  return table->Find(*message, storage, rows, out_rows, found, stream);
}

int fusedrec_table_apply(FusedrecDeviceTable* table, const int64_t* handles, int64_t num_rows, const int32_t* inverse,
                         int64_t num_ids, const void* grads, int64_t storage, float scale, const FusedrecUpdate* update,
                         int64_t clock, void* stream) {
  return table->Apply(handles, num_rows, inverse, num_ids, grads, storage, scale, *update,
                      static_cast<uint32_t>(clock), stream);
}

void fusedrec_table_size(FusedrecDeviceTable* table, int64_t* sizes, int64_t* about) { table->Size(sizes, about); }
