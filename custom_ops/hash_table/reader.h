// While a Reader of a table lives, lines of keys that were replaced meanwhile are kept.
#ifndef FUSEDREC_HASH_TABLE_READER_H_
#define FUSEDREC_HASH_TABLE_READER_H_

#include "hash_table/hash_table.h"

namespace fusedrec {

// The writer swaps the lines and then looks for readers; a reader announces itself and then loads the lines. Both in one
// total order: a writer that sees no reader knows that whoever comes later gets the new lines.
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

#endif  // FUSEDREC_HASH_TABLE_READER_H_
