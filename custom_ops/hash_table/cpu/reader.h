// While a Reader of a table lives, replaced lines of keys are kept, and no other id gets a row that left. A reader that
// found a row can therefore read it.
#ifndef FUSEDREC_HASH_TABLE_CPU_READER_H_
#define FUSEDREC_HASH_TABLE_CPU_READER_H_

#include "hash_table/cpu/hash_table.h"

namespace fusedrec {

// The writer changes the lines and then looks for readers. A reader announces itself and then loads the lines. Both change
// the same counter (the writer adds 0), so one comes before the other. A writer that sees no reader knows that every later
// reader sees the current lines.
class HashTable::Reader {
 public:
  explicit Reader(const HashTable* table) : table_(table) { table_->readers_.fetch_add(1, std::memory_order_seq_cst); }
  ~Reader() { table_->readers_.fetch_sub(1, std::memory_order_seq_cst); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

 private:
  const HashTable* table_;
};

}  // namespace fusedrec

#endif  // FUSEDREC_HASH_TABLE_CPU_READER_H_
