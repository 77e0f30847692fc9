// A table whose ops run on a CPU: HashTable, with the checks of handles, look-aheads and contents that its callers need.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "hash_table/cpu/hash_table.h"
#include "hash_table/table.h"

namespace fusedrec {

class HostTable : public Table {
 public:
  explicit HostTable(std::unique_ptr<HashTable> table) : table_(std::move(table)) {}

  const TableSpec& spec() const override { return table_->spec(); }
  absl::Status Lookup(const TableCall& call, const Message& message, const Ahead* ahead, const RowsOut& rows,
                      int32_t* inverse, int64_t* handles, int64_t* num_rows) override;
  absl::Status LookAhead(const TableCall& call, const Message& message, const RowsOut& rows, absl::Span<int64_t> handles,
                         Ahead* mark) override;
  absl::Status Read(const TableCall& call, const Message& message, const Ahead* ahead, bool peeks,
                    const RowsOut& rows) override;
  absl::Status Prefetch(const TableCall& call, const Message& message) override;
  absl::Status Apply(const TableCall& call, const Gradients& grads, const Step& step,
                     std::vector<int32_t>* left_out) override;
  absl::Status Accumulate(const TableCall& call, const Gradients& grads, bool begin,
                          std::vector<int32_t>* left_out) override;
  absl::Status ApplyAccumulated(const TableCall& call, const Step& step) override;

  absl::Status Statistics(TableStatistics* statistics) override;
  absl::Status Keys(const TableCall& call, int64_t segment, Moment since, std::vector<int64_t>* ids,
                    std::vector<int64_t>* handles) override;
  int64_t record_bytes() const override { return table_->records().bytes(); }
  absl::Status ReadRecords(const TableCall& call, absl::Span<const int64_t> handles, char* records) override;
  absl::Status Import(const TableCall& call, int64_t segment, absl::Span<const int64_t> ids, const char* records) override;
  absl::Status Remove(const TableCall& call, int64_t segment, absl::Span<const int64_t> ids, int64_t* removed) override;
  absl::Status Evict(const TableCall& call, int64_t segment, int64_t count, int64_t* evicted) override;
  absl::Status Clear(const TableCall& call) override;
  absl::Status Tombstones(const TableCall& call, int64_t segment, std::vector<int64_t>* ids) override;
  void ForgetTombstones() override { table_->ForgetTombstones(); }
  absl::Status Candidates(const TableCall& call, int64_t segment, std::vector<int64_t>* ids,
                          std::vector<int64_t>* counts) override;
  absl::Status SetCandidates(const TableCall& call, int64_t segment, absl::Span<const int64_t> ids,
                             absl::Span<const int64_t> counts) override;
  Moment Clock() override { return {table_->clock(), table_->version()}; }
  void SetClock(Moment clock) override { table_->SetClock(clock.lookups, clock.version); }

  absl::Status NoteTrained(const TableCall& call, const Message& message) override;
  absl::Status TakeUnsynced(const TableCall& call, const FusedrecUnsyncedSink& sink) override;
  int64_t width() const override { return table_->format(0).numbers(); }
  absl::Status ReadNumbers(const TableCall& call, absl::Span<const int64_t> ids, absl::Span<const int64_t> splits,
                           float* numbers, int64_t size) override;
  absl::Status Merge(const TableCall& call, const FusedrecMerge& merge) override;

 protected:
  // Checks a look-ahead of this message.
  absl::Status CheckAhead(const TableCall& call, const Message& message, const Ahead& ahead) const;
  // Checks handles and inverse. *clock: of the handles' lookup, 0 where none has a row.
  absl::Status CheckGradients(const Gradients& grads, uint32_t* clock) const;

  const std::unique_ptr<HashTable> table_;
};

}  // namespace fusedrec
