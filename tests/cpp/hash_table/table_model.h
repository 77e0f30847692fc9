// A table as an ordered map of rows: slow, obvious, with every policy. It knows nothing of shards but that the limit of
// candidates is theirs, and nothing of threads.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "batches.h"
#include "common/hash.h"

namespace fusedrec {

class TableModel {
 public:
  struct Row {
    std::vector<float> numbers;
    uint32_t last = 0, count = 0;  // count: as it had decayed at `last`
    uint32_t frequency = 0;        // the same, as it has decayed by now
  };
  using Segment = std::map<int64_t, Row>;

  explicit TableModel(const TableSpec& spec)
      : spec_(spec), limits_(spec.limits), segments_(spec.seeds.size()), candidates_(spec.seeds.size()), gone_(spec.seeds.size()),
        statistics_(spec.seeds.size()) {
    limits_.resize(segments_.size());
  }

  const Segment& segment(int64_t s) const { return segments_[s]; }
  uint32_t clock() const { return clock_; }

  std::vector<float> Initial(const Received& key) const {
    std::vector<float> row(spec_.dim);
    InitialRow(spec_.distribution, spec_.a, spec_.b, spec_.seeds[key.segment], key.id, absl::MakeSpan(row));
    return row;
  }

  std::vector<float> Get(const Received& key) const {
    const auto known = segments_[key.segment].find(key.id);
    return known == segments_[key.segment].end() ? Initial(key) : known->second.numbers;
  }

  // False when max_rows cannot hold the batch: nothing changes, but for rows that expire. Ids that admission refuses have
  // no row afterwards.
  bool LookUp(const Packed& packed) {
    const TableModel before = *this;
    if (TryLookUp(packed)) return true;
    *this = before;
    ++clock_;
    Expire();
    --clock_;
    return false;
  }

  // Plain gradient descent: gradients [V, D] of a batch that was looked up before.
  void Apply(const Packed& packed, const std::vector<float>& grads, float scale, float learning_rate) {
    std::map<Received, std::vector<float>> sums;
    for (size_t v = 0; v < packed.received().size(); ++v) {
      std::vector<float>& sum = sums[packed.received()[v]];
      const bool first = sum.empty();
      sum.resize(spec_.dim);
      for (int d = 0; d < spec_.dim; ++d) {
        const float part = grads[v * spec_.dim + d] * scale;
        sum[d] = first ? part : sum[d] + part;
      }
    }
    for (const auto& [key, sum] : sums) {
      const auto known = segments_[key.segment].find(key.id);
      if (known == segments_[key.segment].end()) continue;
      for (int d = 0; d < spec_.dim; ++d) known->second.numbers[d] -= learning_rate * sum[d];
    }
  }

  int64_t Remove(int64_t s, const Ids& ids) {
    int64_t removed = 0;
    for (const int64_t id : ids) removed += Drop(s, id);
    return removed;
  }

  // Lowest first: by last use, or by number of uses and then last use; equal ones by a hash of the id.
  int64_t Evict(int64_t s, int64_t count) {
    if (limits_[s].eviction == Eviction::kNone) return 0;
    std::vector<std::tuple<uint32_t, uint32_t, uint64_t, int64_t>> order;
    for (const auto& [id, row] : segments_[s]) {
      if (row.last + spec_.window > clock_) continue;
      order.emplace_back(limits_[s].eviction == Eviction::kLfu ? row.frequency : 0, row.last, TableHash(id), id);
    }
    std::sort(order.begin(), order.end());
    order.resize(std::min<size_t>(order.size(), count));
    for (const auto& victim : order) Drop(s, std::get<3>(victim));
    statistics_[s].evictions += order.size();
    return order.size();
  }

  Ids Tombstones(int64_t s) const { return {gone_[s].begin(), gone_[s].end()}; }
  void ForgetTombstones() {
    for (std::set<int64_t>& gone : gone_) gone.clear();
  }
  const std::map<int64_t, int64_t>& Candidates(int64_t s) const { return candidates_[s]; }

  SegmentStatistics Statistics(int64_t s) const {
    SegmentStatistics statistics = statistics_[s];
    statistics.keys = segments_[s].size();
    statistics.candidates = candidates_[s].size();
    return statistics;
  }

 private:
  bool TryLookUp(const Packed& packed) {
    ++clock_;
    Decay();
    Expire();
    std::set<Received> fresh;
    for (const Received& key : std::set<Received>(packed.received().begin(), packed.received().end())) {
      if (segments_[key.segment].count(key.id) != 0) {
        ++statistics_[key.segment].hits;
        Touch(key);
      } else if (Admitted(key)) {
        fresh.insert(key);
      } else {
        ++statistics_[key.segment].refused;
      }
    }
    for (size_t s = 0; s < segments_.size(); ++s) {
      const int64_t wanted = std::count_if(fresh.begin(), fresh.end(),
                                           [s](const Received& key) { return key.segment == static_cast<int64_t>(s); });
      const int64_t max_rows = limits_[s].max_rows;
      const int64_t excess = static_cast<int64_t>(segments_[s].size()) + wanted - max_rows;
      if (max_rows > 0 && excess > 0 && Evict(s, excess + max_rows / 16) < excess) return false;
    }
    for (const Received& key : fresh) {
      segments_[key.segment][key.id].numbers = Initial(key);
      gone_[key.segment].erase(key.id);
      ++statistics_[key.segment].inserts;
      Touch(key);
    }
    HalveCandidates();
    return true;
  }

  void Touch(const Received& key) {
    Row& row = segments_[key.segment].at(key.id);
    row.last = clock_;
    row.count = ++row.frequency;
  }

  bool Drop(int64_t s, int64_t id) {
    if (segments_[s].erase(id) == 0) return false;
    if (spec_.record_tombstones) gone_[s].insert(id);
    return true;
  }

  void Decay() {
    for (size_t s = 0; s < segments_.size(); ++s) {
      const int64_t steps = limits_[s].frequency_decay_steps;
      if (steps == 0 || clock_ % steps != 0) continue;
      for (auto& [id, row] : segments_[s]) row.frequency /= 2;
    }
  }

  void Expire() {
    for (size_t s = 0; s < segments_.size(); ++s) {
      const int64_t ttl = limits_[s].ttl;
      if (ttl == 0 || clock_ % std::max<int64_t>(1, ttl / 16) != 0) continue;
      Ids old;
      for (const auto& [id, row] : segments_[s]) {
        if (row.last + std::max(ttl, spec_.window) < clock_) old.push_back(id);
      }
      statistics_[s].evictions += Remove(s, old);
    }
  }

  bool Admitted(const Received& key) {
    const int64_t wanted = limits_[key.segment].admission_count;
    if (wanted <= 1) return true;
    std::map<int64_t, int64_t>& counts = candidates_[key.segment];
    if (counts.count(key.id) != 0) {
      if (++counts[key.id] < wanted) return false;
      counts.erase(key.id);
      return true;
    }
    counts[key.id] = 1;
    return false;
  }

  void HalveCandidates() {
    for (size_t s = 0; s < segments_.size(); ++s) {
      std::map<int64_t, int64_t>& counts = candidates_[s];
      const int64_t most = limits_[s].max_candidates;
      while (most > 0 && static_cast<int64_t>(counts.size()) > most) {
        for (auto item = counts.begin(); item != counts.end();) {
          item->second /= 2;
          item = item->second == 0 ? counts.erase(item) : std::next(item);
        }
      }
    }
  }

  TableSpec spec_;
  std::vector<Limits> limits_;
  uint32_t clock_ = 0;
  std::vector<Segment> segments_;
  std::vector<std::map<int64_t, int64_t>> candidates_;
  std::vector<std::set<int64_t>> gone_;
  std::vector<SegmentStatistics> statistics_;
};

}  // namespace fusedrec
