"""Oracle for hash_table: dictionaries of rows, loops over ids. NumPy only; imports nothing from tf_fusedrec.

A key is (segment, id). Updates are plain gradient descent or Adagrad in float32, with sums in the order of arrival.
"""

import copy
import dataclasses

import numpy as np

from tests.oracles.rank_partition import mix64


def table_hash(id_):
    """The hash of the table's own order (custom_ops/common/hash.h), independent of the owner's hash."""
    return mix64(int(id_) ^ 0xD1B54A32D192ED03)


def pack(batch):
    """Returns message and received_splits of a batch of ids by source and segment, and its keys in order."""
    message, splits, received = [], [], []
    for source in batch:
        block = [len(ids) for ids in source] + [i for ids in source for i in ids]
        message += block
        splits.append(len(block))
        received += [(segment, i) for segment, ids in enumerate(source) for i in ids]
    return np.array(message, np.int64), np.array(splits, np.int32), received


def rounded(numbers, storage):
    """Rounds <float32>[...] to the nearest number of a storage dtype, ties to even, as float32."""
    numbers = np.asarray(numbers, np.float32)
    if storage == "float16":
        return numbers.astype(np.float16).astype(np.float32)
    if storage == "bfloat16":  # the upper half of a float32
        bits = numbers.view(np.uint32).astype(np.uint64)
        return (((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)
    return numbers


class Exhausted(Exception):
    """max_rows is too small for the batch."""


@dataclasses.dataclass
class Row:
    numbers: np.ndarray  # <float32>[D]
    last: int  # Clock of the last training lookup.
    count: int  # Number of training lookups, as it had decayed at `last`.
    frequency: int = 0  # The same, as it has decayed by now.
    hot: bool = True  # False for rows of a mixed table that are kept in float16.
    accumulator: np.ndarray | None = None  # <float32>[D] of Adagrad.


class TableOracle:
    """One table with new rows initial((segment, id)). custom_ops/hash_table/hash_table_op.cc describes the policies.

    Each of the six limits is one value for all segments, or a list with one for each. Rows have the storage dtype; with
    hot_after, rows with fewer lookups are float16 and others float32. The accumulators of 16-bit rows are bfloat16.
    """

    def __init__(
        self, segments, initial, *, max_rows=0, eviction="none", ttl=0, admission_count=1, max_candidates=0,
        frequency_decay_steps=0, record_tombstones=False, window=1, hot_after=0, storage="float32", rule="sgd",
    ):  # fmt: skip
        def each(limit):
            return limit if isinstance(limit, list) else [limit] * segments

        self.segments, self.max_rows, self.eviction = segments, each(max_rows), each(eviction)
        self.storage, self.rule = "float16" if hot_after else storage, rule
        self.initial = lambda key: rounded(initial(key), self.storage)
        self.ttl, self.admission_count, self.max_candidates = each(ttl), each(admission_count), each(max_candidates)
        self.decay, self.record_tombstones = each(frequency_decay_steps), record_tombstones
        self.window, self.hot_after = window, hot_after
        self.clock = self.demotions = 0
        self.clear()

    def clear(self):
        self.rows = [{} for _ in range(self.segments)]
        self.candidates = [{} for _ in range(self.segments)]
        self.gone = [set() for _ in range(self.segments)]
        self.counters = [dict.fromkeys(["hits", "inserts", "evictions", "refused"], 0) for _ in range(self.segments)]

    def find(self, received):
        """Returns rows in the order of the received ids. Unknown ids get initial rows."""
        return [self.rows[s][i].numbers if i in self.rows[s] else self.initial((s, i)) for s, i in received]

    def lookup(self, received):
        """Looks up rows for training. Exhausted: nothing changes, but for rows that expire at this lookup."""
        if not any(self.max_rows):
            return self._look_up(received)
        rows = [{i: copy.copy(row) for i, row in of.items()} for of in self.rows]
        before = rows, *([copy.copy(one) for one in of] for of in (self.candidates, self.gone, self.counters))
        try:
            return self._look_up(received)
        except Exhausted:
            self.rows, self.candidates, self.gone, self.counters = before
            self._expire()
            self.clock -= 1
            raise

    def _look_up(self, received):
        self.clock += 1
        self._decay()
        self._expire()
        fresh, rising = [[] for _ in range(self.segments)], []
        for s, i in sorted(set(received)):
            if i in self.rows[s] and self._gets_hot(self.rows[s][i]):
                rising.append((s, i))  # A batch that does not fit leaves it as it is.
            elif i in self.rows[s]:
                self.counters[s]["hits"] += 1
                self._touch(self.rows[s][i])
            elif self._admits(s, i):
                fresh[s].append(i)
            else:
                self.counters[s]["refused"] += 1
        for s, ids in enumerate(fresh):
            max_rows = self.max_rows[s]
            excess = len(self.rows[s]) + len(ids) - max_rows
            if max_rows and excess > 0 and self.evict(s, excess + max_rows // 16, rising) < excess:
                raise Exhausted
        for s, ids in enumerate(fresh):
            for i in ids:
                self.rows[s][i] = row = Row(self.initial((s, i)), 0, 0, hot=not self.hot_after)
                if self.rule == "adagrad":
                    self._store(row, row.numbers, np.full_like(row.numbers, 0.1))
                self._touch(self.rows[s][i])
                self.gone[s].discard(i)
            self.counters[s]["inserts"] += len(ids)
        for s, i in rising:
            self.rows[s][i].hot = True
            self.counters[s]["hits"] += 1
            self._touch(self.rows[s][i])
        for s, counts in enumerate(self.candidates):
            while self.max_candidates[s] and len(counts) > self.max_candidates[s]:
                counts = self.candidates[s] = {i: count // 2 for i, count in counts.items() if count > 1}
        found = self.find(received)
        self._demote()
        return found

    def skip(self, lookups):
        """Sets the clock ahead, as a load does."""
        for _ in range(lookups):
            self.clock += 1
            self._decay()

    def apply(self, received, grads, scale, learning_rate):
        """Applies grads [V, D] of a looked-up batch. Ids that admission refused have no row."""
        sums = {}
        for key, grad in zip(received, grads.astype(np.float32) * np.float32(scale)):
            sums[key] = sums[key] + grad if key in sums else grad
        for (s, i), total in sums.items():
            if i in self.rows[s]:
                row = self.rows[s][i]
                step, accumulator = np.float32(learning_rate) * total, None
                if self.rule == "adagrad":
                    accumulator = row.accumulator + total * total
                    step = step / (np.sqrt(accumulator) + np.float32(1e-7))
                self._store(row, row.numbers - step, accumulator)

    def remove(self, s, ids):
        return sum(self._drop(s, i) for i in ids)

    def evict(self, s, count, staying=()):
        """Evicts the rows used longest ago, or least often and then longest ago, but no rows of the last lookups, nor
        the keys `staying`."""
        if self.eviction[s] == "none":
            return 0
        by_count = self.eviction[s] == "lfu"
        old = [(i, row) for i, row in self.rows[s].items() if self._is_free(row) and (s, i) not in staying]
        old.sort(key=lambda item: (item[1].frequency if by_count else 0, item[1].last, table_hash(item[0])))
        evicted = self.remove(s, [i for i, _ in old[:count]])
        self.counters[s]["evictions"] += evicted
        return evicted

    def tombstones(self, s):
        return sorted(self.gone[s])

    def forget_tombstones(self):
        self.gone = [set() for _ in range(self.segments)]

    def export(self, s):
        """Returns [(id, Row)] in the order of checkpoints."""
        return sorted(self.rows[s].items(), key=lambda item: mix64(item[0]))

    def export_candidates(self, s):
        return sorted(self.candidates[s].items(), key=lambda item: mix64(item[0]))

    def statistics(self):
        """Returns [S, 6]: keys, hits, inserts, evictions, refused, candidates."""
        return [
            [len(rows), *counters.values(), len(candidates)]
            for rows, counters, candidates in zip(self.rows, self.counters, self.candidates)
        ]

    def _touch(self, row):
        row.last = self.clock
        row.frequency += 1
        row.count = row.frequency

    def _store(self, row, numbers, accumulator):
        storage = "float32" if self.hot_after and row.hot else self.storage
        row.numbers = rounded(numbers, storage)
        if accumulator is not None:
            row.accumulator = rounded(accumulator, "float32" if storage == "float32" else "bfloat16")

    def _is_free(self, row):
        """Returns whether no lookup may still need the row where it is."""
        return row.last + self.window <= self.clock

    def _gets_hot(self, row):
        return not row.hot and row.frequency + 1 >= self.hot_after and self._is_free(row)

    def _decay(self):
        for rows, steps in zip(self.rows, self.decay):
            if steps and self.clock % steps == 0:
                for row in rows.values():
                    row.frequency //= 2

    def _has_turn(self, i, steps):
        """In `steps` lookups every row has its turn once, which the six highest bits of its hash choose."""
        return (table_hash(i) >> 58) * steps // 64 == self.clock % steps

    def _demote(self):
        for rows, steps in zip(self.rows, self.decay):
            for i, row in rows.items() if steps and self.hot_after else ():
                if row.hot and row.frequency < self.hot_after and self._is_free(row) and self._has_turn(i, steps):
                    row.hot, self.demotions = False, self.demotions + 1
                    self._store(row, row.numbers, row.accumulator)

    def _drop(self, s, i):
        if self.rows[s].pop(i, None) is None:
            return 0
        if self.record_tombstones:
            self.gone[s].add(i)
        return 1

    def _expire(self):
        for s, rows in enumerate(self.rows):
            if not self.ttl[s]:
                continue
            age, steps = max(self.ttl[s], self.window), max(1, self.ttl[s] // 16)
            old = [i for i, row in rows.items() if row.last + age < self.clock and self._has_turn(i, steps)]
            self.counters[s]["evictions"] += self.remove(s, old)

    def _admits(self, s, i):
        if self.admission_count[s] <= 1:
            return True
        counts = self.candidates[s]
        if i in counts:
            counts[i] += 1
            if counts[i] < self.admission_count[s]:
                return False
            del counts[i]
            return True
        counts[i] = 1
        return False
