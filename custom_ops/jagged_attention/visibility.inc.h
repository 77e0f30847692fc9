// Who sees whom, as in the public HSTU operators. One text for the tile engines, each of which includes it in a namespace
// of its own (tile_engine.h), for the kernels of a GPU, and for host code.
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

template <typename Call>
FUSEDREC_HOST_DEVICE static inline int64_t RowLength(const Call& call, int64_t row) {
  return call.row_splits[row + 1] - call.row_splits[row];
}

// The place of the row's first query.
template <typename Call>
FUSEDREC_HOST_DEVICE static inline int64_t FirstQuery(const Call& call, int64_t row) {
  return RowLength(call, row) - (call.query_splits[row + 1] - call.query_splits[row]);
}

// Place p of a row is number QueryStart + p among the query tokens.
template <typename Call>
FUSEDREC_HOST_DEVICE static inline int64_t QueryStart(const Call& call, int64_t row) {
  return call.query_splits[row] - FirstQuery(call, row);
}

struct RowMask {
  int length, context, top, window, full_from;
  int first;  // keys with lower numbers are seen whatever the window
  int targets_from, group_size;
  bool contextual, grouped;

  FUSEDREC_HOST_DEVICE int Number(int place) const {
    const int number = place < context ? 0 : place - context;
    return number < top ? number : top;
  }
  FUSEDREC_HOST_DEVICE int Group(int place) const { return (place - targets_from) / group_size; }
  // Place of a token for the bias. All targets have the place after the history.
  FUSEDREC_HOST_DEVICE int Place(int place) const { return place < targets_from ? place : targets_from; }
};

FUSEDREC_HOST_DEVICE static inline int AtMost(int64_t number, int64_t most) {
  return static_cast<int>(number < most ? number : most);
}

template <typename Call>
FUSEDREC_HOST_DEVICE static inline RowMask MaskOf(const Call& call, int64_t row) {
  const int64_t length = RowLength(call, row), targets = call.num_targets == nullptr ? 0 : call.num_targets[row];
  const int64_t context = call.contextual_lengths == nullptr ? 0 : call.contextual_lengths[row];
  RowMask mask;
  mask.length = static_cast<int>(length);
  mask.contextual = context > 0;
  // A context that is longer than its row hides the row, whatever its length.
  mask.context = mask.contextual ? AtMost(context - 1, length + 1) : 0;
  mask.targets_from = static_cast<int>(length - targets);
  mask.top = mask.targets_from - mask.context;
  mask.window = AtMost(call.attention_window, length);
  // Without a full attention at the end, no number is large enough.
  mask.full_from =
      call.min_full_length > 0 ? mask.top - AtMost(call.min_full_length, mask.top > 0 ? mask.top : 0) : 0x7fffffff;
  mask.first = AtMost(call.global_window, length) + (call.global_window > 0 && mask.contextual ? 1 : 0);
  mask.group_size = AtMost(call.target_group_size, length + 1);
  mask.grouped = mask.group_size > 1 && targets > 1;
  return mask;
}

// Returns whether queries [i0, i1) and keys [j0, j1) have targets of one group.
FUSEDREC_HOST_DEVICE static inline bool ShareGroup(const RowMask& mask, int i0, int i1, int j0, int j1) {
  const int from = mask.targets_from;
  if (!mask.grouped || i1 <= from || j1 <= from) return false;
  return mask.Group(i0 < from ? from : i0) <= mask.Group(j1 - 1) && mask.Group(j0 < from ? from : j0) <= mask.Group(i1 - 1);
}

// Returns whether none of queries [i0, i1) sees any of keys [j0, j1). May return false for an empty rectangle.
FUSEDREC_HOST_DEVICE static inline bool NoneVisible(const RowMask& mask, int i0, int i1, int j0, int j1) {
  const int asks_low = mask.Number(i0), asks_high = mask.Number(i1 - 1);
  const int answers_low = mask.Number(j0), answers_high = mask.Number(j1 - 1);
  const bool near = mask.window <= 0 || asks_low - answers_high <= mask.window || asks_high >= mask.full_from ||
                    answers_low < mask.first;
  const bool causal = (i0 < j1 && j0 < i1) || asks_high > answers_low;
  const bool context = mask.contextual && asks_low == 0 && answers_low < mask.top;
  return !(causal && near) && !context && !ShareGroup(mask, i0, i1, j0, j1);
}

// Returns whether all of them see all of these. May return false where they do.
FUSEDREC_HOST_DEVICE static inline bool AllVisible(const RowMask& mask, int i0, int i1, int j0, int j1) {
  const int asks_low = mask.Number(i0), asks_high = mask.Number(i1 - 1);
  const int answers_low = mask.Number(j0), answers_high = mask.Number(j1 - 1);
  if (mask.contextual && asks_high == 0 && answers_high < mask.top) return true;
  const bool near = mask.window <= 0 || asks_high - answers_low <= mask.window || asks_low >= mask.full_from ||
                    answers_high < mask.first;
  return asks_low > answers_high && near;
}

// Dropout of pairs. lowbias32 by Chris Wellons mixes seed, row, head, key and query, one after the other.
template <typename Bits>
FUSEDREC_HOST_DEVICE static inline Bits MixBits(Bits x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

template <typename Bits, typename Numbers>
FUSEDREC_HOST_DEVICE static inline Bits NextPair(Bits bits, Numbers numbers) {
  return MixBits(bits + numbers * 0x9e3779b9u);
}

// The share of row and head in the bits of their pairs.
template <typename Call>
FUSEDREC_HOST_DEVICE static inline uint32_t HeadBits(const Call& call, int64_t row, int64_t head) {
  return NextPair(NextPair(call.pair_seed, static_cast<uint32_t>(row)), static_cast<uint32_t>(head));
}

// Not 0 where a query sees key j: a number (Lanes int, Bits uint32_t), or a vector of queries with all ones where they do.
// asks: number(places); places: of the queries. dropped: 0 without dropout.
template <typename Bits, typename Lanes>
FUSEDREC_HOST_DEVICE static inline Lanes VisiblePairs(const RowMask& mask, uint32_t dropped, uint32_t head_bits, Lanes asks,
                                                      Lanes places, int j) {
  const int answers = mask.Number(j);
  Lanes visible = (places == j) | (asks > answers);
  if (mask.window > 0 && answers >= mask.first) visible &= (asks - answers <= mask.window) | (asks >= mask.full_from);
  if (mask.contextual && answers < mask.top) visible |= asks == 0;
  if (mask.grouped && j >= mask.targets_from) {
    const int group_begin = mask.targets_from + mask.Group(j) * mask.group_size;
    visible |= (places > j) & (places - group_begin < mask.group_size);
  }
  if (dropped > 0) {
    const Bits pairs = MixBits((Bits)places * 0x9e3779b9u + NextPair(head_bits, static_cast<uint32_t>(j)));
    visible &= (Lanes)(pairs >> 1) >= static_cast<int>(dropped);
  }
  return visible;
}

// Number of thresholds <= |ask - answer|, which may need all 64 bits.
FUSEDREC_HOST_DEVICE static inline uint64_t TimeBetween(int64_t ask, int64_t answer) {
  const uint64_t a = static_cast<uint64_t>(ask), b = static_cast<uint64_t>(answer);
  return ask >= answer ? a - b : b - a;
}

FUSEDREC_HOST_DEVICE static inline bool Reaches(uint64_t difference, int64_t threshold) {
  return threshold <= 0 || static_cast<uint64_t>(threshold) <= difference;
}

FUSEDREC_HOST_DEVICE static inline int SearchBucket(const int64_t* thresholds, int count, uint64_t difference) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (Reaches(difference, thresholds[middle])) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}
