// Panels of queries and tiles of keys under the rule of visibility.inc.h.

enum class Visible { kNone, kSome, kAll };

// Classifies queries [i0, i1) and keys [j0, j1). The answer may be kSome for a rectangle that holds none or all.
static inline Visible Classify(const RowMask& mask, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  if (AllVisible(mask, i0, i1, j0, j1)) return Visible::kAll;
  return NoneVisible(mask, i0, i1, j0, j1) ? Visible::kNone : Visible::kSome;
}

// No query before `end` sees keys from here on, because only context tokens see later tokens.
static inline int64_t LastVisible(const RowMask& mask, int64_t end) { return mask.contextual ? mask.length : end; }

// The queries of a panel, one per lane.
struct PanelMask {
  RowMask row;
  uint32_t dropped = 0, head_bits = 0;
  int64_t begin, end;  // places of the queries
  int32_t numbers[kPanel] __attribute__((aligned(64)));
  int32_t places[kPanel] __attribute__((aligned(64)));
};

static inline void SetPanel(const RowMask& row, int64_t begin, int64_t end, PanelMask* panel) {
  panel->row = row;
  panel->begin = begin;
  panel->end = end;
  for (int64_t lane = 0; lane < kPanel; ++lane) {
    panel->places[lane] = static_cast<int32_t>(begin + lane);
    panel->numbers[lane] = row.Number(Lesser(begin + lane, end - 1));
  }
}

// Pairs that VisibleLanes tells of from now on are of this head.
static inline void SetHead(const AttentionProblem& problem, int64_t row, int64_t head, PanelMask* panel) {
  panel->dropped = problem.dropped;
  panel->head_bits = HeadBits(problem, row, head);
}

// All ones where the queries of `lane` and the following see key j.
static inline IntVec VisibleLanes(const PanelMask& panel, int64_t lane, int64_t j) {
  return VisiblePairs<UintVec>(panel.row, panel.dropped, panel.head_bits, LoadInt(panel.numbers + lane),
                               LoadInt(panel.places + lane), static_cast<int>(j));
}

// A rectangle of pairs that is worth a product: keys [key_begin, key_end), lanes [lane_begin, lane_end) of the panel.
struct Tile {
  int64_t key_begin, key_end;
  int64_t lane_begin, lane_end;
  bool masked;  // some pairs are hidden

  int64_t keys() const { return key_end - key_begin; }
  int64_t lanes() const { return lane_end - lane_begin; }
};

constexpr int64_t kFine = 16;  // keys of a tile at the edge of the visible pairs

// Walks over the tiles of a panel and keys [begin, end) that are not empty. Lanes are those with queries, rounded up
// to vectors.
class Tiles {
 public:
  Tiles(const PanelMask& panel, int64_t begin, int64_t end)
      : panel_(panel), next_(begin), end_(end), lanes_(RoundUp(panel.end - panel.begin, kLanes)) {}

  bool Next(Tile* tile) {
    while (next_ < end_) {
      const bool at_coarse = next_ >= fine_until_;
      const int64_t until = Lesser(next_ + (at_coarse ? kTileKeys : kFine), at_coarse ? end_ : fine_until_);
      tile->key_begin = next_;
      tile->key_end = until;
      const Visible visible = Classify(panel_.row, panel_.begin, panel_.end, next_, until);
      if (at_coarse && visible == Visible::kSome) {
        fine_until_ = until;
        continue;
      }
      next_ = until;
      if (visible == Visible::kAll) {
        tile->lane_begin = 0;
        tile->lane_end = lanes_;
        tile->masked = false;
        return true;
      }
      if (visible == Visible::kSome && Trim(tile)) return true;
    }
    return false;
  }

 private:
  // Leaves out empty vectors at both ends; false when all are.
  bool Trim(Tile* tile) const {
    tile->lane_begin = lanes_;
    tile->lane_end = 0;
    tile->masked = false;
    for (int64_t lane = 0; lane < lanes_; lane += kLanes) {
      const int64_t first = panel_.begin + lane;
      const Visible visible =
          Classify(panel_.row, first, Lesser(first + kLanes, panel_.end), tile->key_begin, tile->key_end);
      if (visible == Visible::kNone) {
        tile->masked |= tile->lane_end > 0;  // perhaps between two that are visible
        continue;
      }
      tile->masked |= visible == Visible::kSome;
      tile->lane_begin = Lesser(tile->lane_begin, lane);
      tile->lane_end = lane + kLanes;
    }
    return tile->lane_end > 0;
  }

  const PanelMask& panel_;
  int64_t next_, end_, lanes_;
  int64_t fine_until_ = 0;
};
