#include "hash_table/cuda/hot_rows.h"

#include <algorithm>

#include "common/hash.h"

namespace fusedrec {

FusedrecPoolMoves HotRows::Plan::Moves() {
  numbers.clear();
  for (const std::vector<int64_t>* part : {&leaving, &kept, &slots, &dropped}) {
    numbers.insert(numbers.end(), part->begin(), part->end());
  }
  return {numbers.data(), static_cast<int64_t>(leaving.size()), static_cast<int64_t>(kept.size()),
          static_cast<int64_t>(dropped.size())};
}

int64_t HotRows::Find(const SegmentId& key, const RowHeader& header) const {
  const uint32_t slot = SlotOf(key);
  return slot == kAbsent || header.updated > slots_[slot].stamp ? kNoRow : int64_t{slot};
}

int64_t HotRows::Choose(uint32_t count, const HashTable& table, int64_t* unused) {
  const int64_t capacity = capacity_;
  if (used_ + *unused < capacity) {
    const int64_t slot = used_ + (*unused)++;
    if (slot >= static_cast<int64_t>(slots_.size())) slots_.resize(slot + 1);
    return slot;
  }
  int64_t lowest = kNoRow;
  uint32_t its_count = 0;
  for (int64_t i = 0; i < std::min(kSample, capacity); ++i) {
    const int64_t at = (hand_ + i) % capacity;
    Slot* slot = &slots_[at];
    if (slot->plan == plan_) continue;
    if (i == 0 && table.HandleOf(slot->key) == kNoRow) slot->count = 0;
    const uint32_t now = table.spec().limits[slot->key.segment].CountAt(slot->count, slot->last, table.clock());
    if (lowest != kNoRow && now >= its_count) continue;
    lowest = at;
    its_count = now;
  }
  hand_ = (hand_ + 1) % capacity;
  return lowest != kNoRow && its_count < count ? lowest : kNoRow;
}

absl::Status HotRows::PlanEnd(const BatchRows& batch, bool trained, const HashTable& table, Plan* plan) {
  ++plan_;
  const auto keep = [&](int64_t n, int64_t slot, bool is_newer) {
    const RowHeader& header = table.HeaderOf(batch.handles[n]);
    plan->kept.push_back(n);
    plan->slots.push_back(slot);
    plan->rows.push_back({batch.keys[n], header.updated, header.count, header.last, plan_, is_newer || trained});
    slots_[slot].plan = plan_;
  };
  std::vector<int64_t> others, fresh(index_.size(), 0);
  for (int64_t n = 0; n < static_cast<int64_t>(batch.keys.size()); ++n) {
    const uint32_t slot = SlotOf(batch.keys[n]);
    if (slot == kAbsent) {
      others.push_back(n);
    } else {
      keep(n, slot, slots_[slot].is_newer);
    }
  }
  int64_t unused = 0;
  std::vector<SegmentId> dropped;
  for (const int64_t n : others) {
    const int64_t slot = Choose(table.HeaderOf(batch.handles[n]).count, table, &unused);
    if (slot == kNoRow) {
      if (!trained) continue;
      plan->leaving.push_back(n);
      plan->returning.push_back(batch.keys[n]);
      continue;
    }
    if (slot < used_ && slots_[slot].is_newer) {
      plan->dropped.push_back(slot);
      dropped.push_back(slots_[slot].key);
    }
    keep(n, slot, false);
    ++fresh[batch.keys[n].segment];
  }
  plan->returning.insert(plan->returning.end(), dropped.begin(), dropped.end());
  for (size_t s = 0; s < index_.size(); ++s) {
    KeyIndex::Retired retired;  // one thread at a time reads the index
    const absl::Status room = index_[s].Reserve(fresh[s], &retired);
    if (!room.ok()) return room;
  }
  return absl::OkStatus();
}

void HotRows::Commit(const Plan& plan) {
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const int64_t at = plan.slots[i];
    const Slot &row = plan.rows[i], &before = slots_[at];
    const bool stays = at < used_ && before.key.segment == row.key.segment && before.key.id == row.key.id;
    if (!stays) {
      if (at < used_) index_[before.key.segment].Remove(before.key.id, TableHash(before.key.id));
      index_[row.key.segment].Insert(row.key.id, TableHash(row.key.id), static_cast<uint32_t>(at));
    }
    used_ = std::max(used_, at + 1);
    slots_[at] = row;
  }
}

std::vector<int64_t> HotRows::Newer() const {
  std::vector<int64_t> newer;
  for (int64_t slot = 0; slot < used_; ++slot) {
    if (slots_[slot].is_newer) newer.push_back(slot);
  }
  return newer;
}

void HotRows::NoteWritten(int64_t slot, uint32_t updated) {
  slots_[slot].stamp = std::max(slots_[slot].stamp, updated);
  slots_[slot].is_newer = false;
}

void HotRows::Clear() {
  for (KeyIndex& index : index_) {
    KeyIndex::Retired retired;
    index.Clear(&retired);
  }
  slots_.clear();
  used_ = hand_ = 0;
}

}  // namespace fusedrec
