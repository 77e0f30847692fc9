"""Oracle for 16-bit rows and mixed tables: a dict of float32 numbers that are exact in their storage dtype.

NumPy only; imports nothing from tf_fusedrec. It rounds to the nearest number, ties to even.
"""

import numpy as np

from tests.oracles.hash_table import table_hash


def rounded(numbers, storage):
    """Rounds float32 `numbers` to a storage dtype ("float32", "float16", "bfloat16"), as float32."""
    numbers = np.asarray(numbers, np.float32)
    if storage == "float16":
        return numbers.astype(np.float16).astype(np.float32)
    if storage == "bfloat16":  # the upper half of a float32
        bits = numbers.view(np.uint32).astype(np.uint64)
        return (((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)
    return numbers


class StorageOracle:
    """One table under SGD, Adagrad or row-wise Adagrad, whose rows are rounded after every update.

    Args:
      initial: Function from an id to its new row [D].
      rule: "sgd", "adagrad" or "rowwise".
      storage: Storage dtype of rows. With hot_after, only rows with fewer lookups have it, and others are float32.
      decay: Number of lookups after which counts are halved and a row may return to `storage`; 0 for never.
    """

    def __init__(self, initial, rule, rate, storage, hot_after=0, decay=0):
        self.initial, self.rule, self.rate = initial, rule, np.float32(rate)
        self.storage, self.hot_after = storage, hot_after
        self.decay, self.clock, self.demotions = decay, 0, 0
        self.rows, self.slots, self.counts, self.wide = {}, {}, {}, set()

    def lookup(self, ids):
        """Makes a training lookup and returns {id: row [D]}."""
        self.clock += 1
        if self.decay and self.clock % self.decay == 0:
            self.counts = {i: count // 2 for i, count in self.counts.items()}
        for i in set(ids):
            self.counts[i] = self.counts.get(i, 0) + 1
            if self.hot_after and self.counts[i] >= self.hot_after:
                self.wide.add(i)
            if i not in self.rows:
                self.rows[i] = rounded(self.initial(i), self._storage_of(i))
                start = np.float32(0 if self.rule == "rowwise" else 0.1)
                self.slots[i] = (
                    start if self.rule == "rowwise" else rounded([start] * len(self.rows[i]), self._slots_of(i))
                )
        found = {i: self.rows[i].copy() for i in ids}
        for i in self.wide - set(ids) if self.decay else ():
            turn = (table_hash(i) >> 58) * self.decay // 64
            if turn == self.clock % self.decay and self.counts[i] < self.hot_after:
                self.demotions += 1
                self.wide.discard(i)
                self.rows[i] = rounded(self.rows[i], self.storage)
                if self.rule != "rowwise":
                    self.slots[i] = rounded(self.slots[i], "bfloat16")
        return found

    def update(self, gradients):
        """Applies summed gradients {id: [D] float32}."""
        for i, g in gradients.items():
            row, slot, g = self.rows[i], self.slots[i], np.asarray(g, np.float32)
            if self.rule == "sgd":
                row = row - self.rate * g
            else:
                slot = slot + (np.sum(g * g, dtype=np.float64).astype(np.float32) if self.rule == "rowwise" else g * g)
                epsilon = np.float32(1e-8 if self.rule == "rowwise" else 1e-7)
                row = row - self.rate * g / (np.sqrt(slot) + epsilon)
            self.rows[i] = rounded(row, self._storage_of(i))
            self.slots[i] = slot if self.rule == "rowwise" else rounded(slot, self._slots_of(i))

    def hot(self):
        """Returns the ids whose rows are float32."""
        return set(self.wide)

    def _storage_of(self, i):
        return "float32" if i in self.hot() else self.storage

    def _slots_of(self, i):
        return "float32" if self._storage_of(i) == "float32" else "bfloat16"
