// The rule of visibility, as in the public HSTU operators:
//
//   number(p) = min(max(p - (C - 1), 0), top), top = length - targets - (C - 1)     (C - 1 is 0 without context)
//   visible(i, j) = i == j or number(i) > number(j)                                 causal, and targets are alone
//   with a window W:   and (number(i) - number(j) <= W or (F > 0 and number(i) >= top - F) or number(j) < first)
//   with context C:    or (number(i) == 0 and number(j) < top)                      context sees context and history
//   with groups of G:  or (i > j, both are targets, and group(i) == group(j))       causal inside a group of targets
//
// C the row's contextual length, W attention_window, F min_full_length, G target_group_size; group(p) = (p - (length -
// targets)) / G. first is 0 without a global_window K, and else K, plus 1 for the context. Numbers do not decrease with
// the place. So the first and the last pair of a rectangle tell whether it holds nothing, everything, or something
// between.

struct RowMask {
  int64_t length, context, top, window, full_from;
  int64_t first;  // keys with lower numbers are seen whatever the window
  int64_t targets_from, group_size;
  bool contextual, grouped;

  int32_t Number(int64_t place) const { return static_cast<int32_t>(Lesser(Greater(place - context, 0), top)); }
  // The group of a target, and the place behind that group.
  int64_t Group(int64_t place) const { return (place - targets_from) / group_size; }
  int64_t GroupEnd(int64_t place) const { return targets_from + (Group(place) + 1) * group_size; }
};

static inline RowMask MaskOf(const AttentionProblem& problem, int64_t row) {
  RowMask mask;
  mask.length = problem.row_splits[row + 1] - problem.row_splits[row];
  // A context that is longer than its row hides the row, whatever its length.
  const int64_t context =
      problem.contextual_lengths == nullptr ? 0 : Lesser(problem.contextual_lengths[row], mask.length + 2);
  mask.contextual = context > 0;
  mask.context = mask.contextual ? context - 1 : 0;
  const int64_t targets = problem.num_targets == nullptr ? 0 : problem.num_targets[row];
  mask.top = mask.length - targets - mask.context;
  mask.window = problem.attention_window;
  // Without a full attention at the end, no number is large enough.
  mask.full_from =
      problem.min_full_length > 0 ? mask.top - Lesser(problem.min_full_length, mask.length + 1) : mask.length + 1;
  mask.first = Lesser(problem.global_window, mask.length) + (problem.global_window > 0 && mask.contextual ? 1 : 0);
  mask.targets_from = mask.length - targets;
  mask.group_size = Lesser(problem.target_group_size, mask.length + 1);
  mask.grouped = mask.group_size > 1 && targets > 1;
  return mask;
}

// Place p of a row is number QueryStart + p among the query tokens.
static inline int64_t QueryStart(const AttentionProblem& problem, int64_t row) {
  return problem.query_splits[row + 1] - (problem.row_splits[row + 1] - problem.row_splits[row]);
}

enum class Visible { kNone, kSome, kAll };

// Returns whether queries [i0, i1) and keys [j0, j1) have targets of one group.
static inline bool ShareGroup(const RowMask& mask, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  if (!mask.grouped || i1 <= mask.targets_from || j1 <= mask.targets_from) return false;
  const int64_t asks_low = mask.Group(Greater(i0, mask.targets_from)), asks_high = mask.Group(i1 - 1);
  const int64_t answers_low = mask.Group(Greater(j0, mask.targets_from)), answers_high = mask.Group(j1 - 1);
  return asks_low <= answers_high && answers_low <= asks_high;
}

// Classifies queries [i0, i1) and keys [j0, j1). The answer may be kSome for a rectangle that holds none or all.
static inline Visible Classify(const RowMask& mask, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  const int64_t asks_low = mask.Number(i0), asks_high = mask.Number(i1 - 1);
  const int64_t answers_low = mask.Number(j0), answers_high = mask.Number(j1 - 1);
  if (mask.contextual && asks_high == 0 && answers_high < mask.top) return Visible::kAll;
  const bool windowed = mask.window > 0;
  const bool all_near = !windowed || asks_high - answers_low <= mask.window || asks_low >= mask.full_from ||
                        answers_high < mask.first;
  if (asks_low > answers_high && all_near) return Visible::kAll;
  const bool diagonal = i0 < j1 && j0 < i1;
  const bool causal = asks_high > answers_low;
  const bool near = !windowed || asks_low - answers_high <= mask.window || asks_high >= mask.full_from ||
                    answers_low < mask.first;
  const bool context = mask.contextual && asks_low == 0 && answers_low < mask.top;
  const bool some = ((diagonal || causal) && near) || context || ShareGroup(mask, i0, i1, j0, j1);
  return some ? Visible::kSome : Visible::kNone;
}

// No query before `end` sees keys from here on, because only context tokens see later tokens.
static inline int64_t LastVisible(const RowMask& mask, int64_t end) { return mask.contextual ? mask.length : end; }

// Dropout of pairs. lowbias32 by Chris Wellons mixes seed, row, head, key and query, one after the other.
constexpr uint32_t kNextPair = 0x9e3779b9u;

template <typename Bits>
static inline Bits MixBits(Bits x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

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
  if (problem.dropped == 0) return;
  const uint32_t of_row = MixBits(problem.pair_seed + static_cast<uint32_t>(row) * kNextPair);
  panel->head_bits = MixBits(of_row + static_cast<uint32_t>(head) * kNextPair);
}

// All ones where the queries of `lane` and the following see key j.
static inline IntVec VisibleLanes(const PanelMask& panel, int64_t lane, int64_t j) {
  const IntVec asks = LoadInt(panel.numbers + lane);
  const IntVec answers = SplatInt(panel.row.Number(j));
  IntVec visible = (LoadInt(panel.places + lane) == SplatInt(static_cast<int32_t>(j))) | (asks > answers);
  if (panel.row.window > 0 && panel.row.Number(j) >= panel.row.first) {
    visible &= (asks - answers <= SplatInt(static_cast<int32_t>(Lesser(panel.row.window, INT32_MAX)))) |
               (asks >= SplatInt(static_cast<int32_t>(Greater(panel.row.full_from, INT32_MIN))));
  }
  if (panel.row.contextual && panel.row.Number(j) < panel.row.top) visible |= asks == IntVec{};
  if (panel.row.grouped && j >= panel.row.targets_from) {
    const IntVec places = LoadInt(panel.places + lane);
    visible |= (places > SplatInt(static_cast<int32_t>(j))) &
               (places < SplatInt(static_cast<int32_t>(Lesser(panel.row.GroupEnd(j), INT32_MAX))));
  }
  if (panel.dropped > 0) {
    const uint32_t of_key = MixBits(panel.head_bits + static_cast<uint32_t>(j) * kNextPair);
    const UintVec pairs = MixBits((UintVec)LoadInt(panel.places + lane) * kNextPair + of_key);
    visible &= (IntVec)(pairs >> 1) >= SplatInt(static_cast<int32_t>(panel.dropped));
  }
  return visible;
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
