// Batches as tests write them, the messages they make, and what a table answers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "common/parallel.h"
#include "hash_table/cpu/hash_table.h"

namespace fusedrec {

using Ids = std::vector<int64_t>;
using Batch = std::vector<std::vector<Ids>>;  // ids by source and segment

struct Received {
  int64_t segment, id;
  bool operator<(const Received& other) const { return std::tie(segment, id) < std::tie(other.segment, other.id); }
};

// A batch as the owner gets it.
class Packed {
 public:
  explicit Packed(const Batch& batch) {
    for (const std::vector<Ids>& source : batch) {
      const size_t begin = entries_.size();
      for (const Ids& ids : source) entries_.push_back(ids.size());
      for (size_t segment = 0; segment < source.size(); ++segment) {
        for (const int64_t id : source[segment]) {
          entries_.push_back(id);
          received_.push_back({static_cast<int64_t>(segment), id});
        }
      }
      splits_.push_back(static_cast<int32_t>(entries_.size() - begin));
    }
  }
  Message message() const { return {entries_, splits_, static_cast<int64_t>(received_.size())}; }
  // In the order of arrival.
  const std::vector<Received>& received() const { return received_; }

 private:
  std::vector<int64_t> entries_;
  std::vector<int32_t> splits_;
  std::vector<Received> received_;
};

struct Answer {
  absl::Status status;
  std::vector<float> rows;  // [V, D]
  std::vector<int32_t> inverse;
  std::vector<int64_t> handles;
  uint32_t clock = 0;

  Gradients With(const std::vector<float>& grads, float scale = 1.0f) const {
    return {handles, inverse, grads.data(), Storage::kFloat32, scale};
  }
};

inline RowsOut Out(std::vector<float>* rows) { return {rows->data(), Storage::kFloat32, 0}; }

// rows: of the look-ahead, if there is one.
inline Answer LookUp(HashTable* table, const Packed& packed, const ParallelFor& parallel_for = SerialFor,
                     const Ahead* ahead = nullptr, std::vector<float> rows = {}, int64_t window = 1) {
  Answer answer;
  answer.rows = std::move(rows);
  answer.rows.resize(packed.received().size() * table->spec().dim);
  answer.inverse.resize(packed.received().size());
  answer.handles.resize(packed.received().size());
  int64_t num_rows = 0;
  answer.status = table->Lookup({parallel_for}, packed.message(), window, ahead, Out(&answer.rows),
                                answer.inverse.data(), answer.handles.data(), &num_rows);
  answer.handles.resize(num_rows);
  for (const int64_t handle : answer.handles) {
    if (handle != kNoRow) answer.clock = static_cast<uint32_t>(handle >> 32);
  }
  return answer;
}

inline absl::Status Apply(HashTable* table, const Answer& answer, const std::vector<float>& grads, const Step& step,
                          const ParallelFor& parallel_for = SerialFor) {
  std::vector<int32_t> left_out;
  return table->Apply({parallel_for}, answer.With(grads), step, &left_out);
}

inline absl::Status Accumulate(HashTable* table, const Answer& answer, const std::vector<float>& grads,
                               float scale = 1.0f, const ParallelFor& parallel_for = SerialFor) {
  std::vector<int32_t> left_out;
  return table->Accumulate({parallel_for}, answer.With(grads, scale), false, &left_out);
}

// Returns how many ids had a row.
inline int64_t Remove(HashTable* table, int64_t segment, const Ids& ids) {
  int64_t removed = 0;
  CHECK_OK(table->Remove({SerialFor}, segment, ids, &removed));
  return removed;
}

inline void Evict(HashTable* table, int64_t segment, int64_t count) {
  int64_t evicted;
  CHECK_OK(table->Evict({SerialFor}, segment, count, &evicted));
}

// The same, of a lookup that must succeed.
inline Answer MustLookUp(HashTable* table, const Packed& packed, const ParallelFor& parallel_for = SerialFor,
                         int64_t window = 1) {
  Answer answer = LookUp(table, packed, parallel_for, nullptr, {}, window);
  CHECK_OK(answer.status);
  return answer;
}

inline std::vector<float> FindRows(HashTable& table, const Packed& packed,
                                   const ParallelFor& parallel_for = SerialFor) {
  std::vector<float> rows(packed.received().size() * table.spec().dim);
  CHECK_OK(table.Read({parallel_for}, packed.message(), 0, nullptr, Out(&rows)));
  return rows;
}

// One row as a checkpoint holds it. Of 16-bit tables `numbers` are bits, two 16-bit numbers in one.
struct Record {
  uint32_t last, count, updated, pool;
  std::vector<float> numbers;  // row, element-wise slots, row-wise slots
};

// All rows of a segment, by id.
inline std::vector<std::pair<int64_t, Record>> Records(HashTable& table, int64_t segment,
                                                       const ParallelFor& parallel_for = SerialFor) {
  Ids ids;
  std::vector<int64_t> handles;
  CHECK_OK(table.Keys({SerialFor}, segment, {}, &ids, &handles));
  const size_t size = table.record_bytes();
  std::vector<char> bytes(size * ids.size());
  CHECK_OK(table.ReadRecords({parallel_for}, handles, bytes.data()));
  std::vector<std::pair<int64_t, Record>> records;
  for (size_t i = 0; i < ids.size(); ++i) {
    Record record;
    std::memcpy(&record.last, &bytes[i * size], 16);
    record.numbers.resize((size - 16 + 3) / 4);
    std::memcpy(record.numbers.data(), &bytes[i * size + 16], size - 16);
    records.emplace_back(ids[i], record);
  }
  std::sort(records.begin(), records.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return records;
}

inline std::map<int64_t, Record> RecordsById(HashTable& table, int64_t segment) {
  std::map<int64_t, Record> by_id;
  for (auto& [id, record] : Records(table, segment)) CHECK(by_id.emplace(id, record).second, "twice: ", id);
  return by_id;
}

// Makes a rule from its parameters in the order of its header. Returns a refusal, or nothing.
inline std::string MakeRule(const std::string& name, const std::vector<float>& numbers, AnyRule* rule) {
  RuleParameters parameters;
  ForEachRule([&](auto r) {
    if (name != r.kName) return;
    size_t i = 0;
    r.Parameters([&](const char* parameter, auto&&...) {
      if (i < numbers.size()) parameters[parameter] = numbers[i];
      ++i;
    });
    for (; i < numbers.size(); ++i) parameters["number " + std::to_string(i)] = numbers[i];
  });
  return ReadRule(name, parameters, rule);
}

inline std::unique_ptr<HashTable> MakeTable(TableSpec spec, const std::string& rule = "sgd",
                                            const std::vector<float>& hyperparameters = {0.0f}) {
  CHECK_EQ(MakeRule(rule, hyperparameters, &spec.rule), "", "rule ", rule);
  if (spec.limits.empty()) spec.limits.resize(spec.seeds.size());
  auto table = std::make_unique<HashTable>(std::move(spec));
  CHECK_OK(table->Open());
  return table;
}

}  // namespace fusedrec
