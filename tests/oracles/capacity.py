"""Oracle for the rows that a table keeps: one dict, scanned. NumPy only; imports nothing from tf_fusedrec.

A row is [last, count, updates]: its last lookup, its number of lookups, and its gradients since insertion.
"""

from tests.oracles.rank_partition import mix64

TABLE_SALT = 0xD1B54A32D192ED03  # Decides which of two equally old rows is evicted first.


class CapacityOracle:
    """One table on one rank.

    Args:
      max_rows, eviction, ttl, admission_count: Options of TableConfig.
      window: Number of last lookups whose rows stay.
    """

    def __init__(self, max_rows=0, eviction=None, ttl=0, admission_count=1, window=1):
        self.max_rows, self.eviction, self.ttl = max_rows, eviction, ttl
        self.admission_count, self.window = admission_count, window
        self.clock = 0
        self.rows, self.seen, self.gone = {}, {}, set()
        self.hits = self.inserts = self.evictions = self.refused = 0

    def lookup(self, ids):
        """Makes a training lookup. Returns the distinct ids with a row after it. Raises MemoryError without room."""
        self.clock += 1
        if self.ttl:
            lifetime = max(self.ttl, self.window)
            self._evict([i for i, (last, _, _) in self.rows.items() if self.clock - 1 - last >= lifetime])
        wanted = sorted(set(ids))
        known = [i for i in wanted if i in self.rows]
        for i in known:
            self.rows[i][0], self.rows[i][1] = self.clock, self.rows[i][1] + 1
        self.hits += len(known)
        admitted = [i for i in wanted if i not in self.rows and self._admits(i)]
        excess = len(self.rows) + len(admitted) - self.max_rows
        if self.max_rows and excess > 0:
            # A sixteenth more than needed leaves, so that one search serves many evictions.
            victims = self.worst(excess + self.max_rows // 16) if self.eviction else []
            self._evict(victims)
            if len(victims) < excess:
                raise MemoryError
        for i in admitted:
            self.rows[i] = [self.clock, 1, 0]
        self.inserts += len(admitted)
        self.gone -= set(admitted)
        return [i for i in wanted if i in self.rows]

    def update(self, ids):
        """Counts an update of every id with a row, once per occurrence."""
        for i in ids:
            if i in self.rows:
                self.rows[i][2] += 1

    def worst(self, count):
        """Returns the `count` ids that the policy ranks lowest among those outside the window."""

        def rank(i):
            last, times, _ = self.rows[i]
            return (last, 0) if self.eviction == "lru" else (times, last), mix64(i ^ TABLE_SALT)

        return sorted((i for i, row in self.rows.items() if row[0] + self.window <= self.clock), key=rank)[:count]

    def _admits(self, i):
        self.seen[i] = self.seen.get(i, 0) + 1
        if self.seen[i] < self.admission_count:
            self.refused += 1
            return False
        del self.seen[i]
        return True

    def _evict(self, ids):
        for i in ids:
            del self.rows[i]
            self.gone.add(i)
        self.evictions += len(ids)
