"""Random histories of operations on a table, whatever its options, agree with a dictionary (tests/oracles)."""

import collections
import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.oracles.hash_table import Exhausted, TableOracle, pack
from tests.oracles.initial_rows import initial_row_oracle
from tests.support.hash_tables import Table
from tests.support.ids import INT64_MAX, INT64_MIN
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

DIM, SEEDS = 3, [5, -6]
IDS = [*range(12), -1, INT64_MIN, INT64_MAX, 1 << 40]
ADAGRAD = [0.0, 0.1, 1e-7, 0.0, 0.0]
TIER_ROWS = 64


@functools.cache
def initial(key):
    """Returns a uniform initial row: equal in float32 and double, unlike a normal one."""
    segment, id_ = key
    return initial_row_oracle("uniform", 0.0, 1.0, SEEDS[segment], id_, DIM)


class History:
    """Runs the same operations on a table and its oracle.

    Args:
      options: Options of both, and for the table alone `unknown` and `tier_folder`; rows beyond TIER_ROWS lie there.
    """

    def __init__(self, options):
        self.options = options
        names = {name: value for name, value in options.items() if name not in ("unknown", "tier_folder")}
        self.table, self.oracle = self._new_table(), TableOracle(2, initial, **names)
        self.adagrad = options.get("rule") == "adagrad"
        self.waiting, self.coming = [], None

    def _new_table(self):
        options = dict(self.options)
        if options.get("rule") == "adagrad":
            options["hyperparameters"] = ADAGRAD
        if "tier_folder" in options:
            options["memory_budget"] = TIER_ROWS * (40 if "hyperparameters" in options else 28)
        return Table(2, DIM, **options)

    def destroy(self):
        tf.raw_ops.DestroyResourceOp(resource=self.table.handle)

    def look_ahead(self, batch, apart):
        """Reads rows for a coming lookup of all sources, or for those of the first source."""
        message, splits, _ = pack(batch[:1] if apart else batch)
        self.coming = batch, apart, ops.table_look_ahead(self.table.handle, message, splits, dim=DIM)

    def train(self, batch, number, *, depth=1, apart=False, uses_ahead=False, in_parts=False):
        """Looks up a batch, or the one of the last look-ahead, and updates so that fewer than `depth` updates wait.

        apart: Reads the rows of the first source before the lookup, which then reads none.
        in_parts: Sums the gradients in two halves before the update.
        """
        ahead = None
        if uses_ahead and self.coming:
            (batch, apart, ahead), self.coming = self.coming, None
        message, splits, received = pack(batch)
        window = self.table.window = self.oracle.window = len(self.waiting) + 1
        try:
            want = self.oracle.lookup(received)
        except Exhausted:
            with pytest.raises(tf.errors.ResourceExhaustedError):
                self.table.lookup(batch)
            return
        if apart:
            part, part_splits, of_part = pack(batch[:1])
            rows = ops.table_read(self.table.handle, part, part_splits, ahead, window=window, dim=DIM)
            want = want[: len(of_part)]
        found = ops.table_lookup(
            self.table.handle, message, splits, None if apart else ahead, with_rows=not apart, window=window, dim=DIM
        )
        self._check_rows(rows if apart else found.rows, want)
        handles = found.handles.numpy()[found.inverse.numpy()]
        for key, handle in zip(received, handles):
            assert (handle == -1) == (key[1] not in self.oracle.rows[key[0]])
        places = {(handle, key if handle == -1 else 0) for key, handle in zip(received, handles)}
        assert len(places) == len(set(received))
        self.waiting.append((found, received, handles != -1, number, in_parts))
        while len(self.waiting) >= depth:
            self._update(*self.waiting.pop(0))

    def _update(self, found, received, has_row, number, in_parts):
        # Multiples of 1/64 make sums exact. Each column and position has another number.
        grads = (number + np.arange(len(received) * DIM).reshape(-1, DIM) % 7).astype(np.float32) / 64
        if in_parts:
            for _ in range(2):
                ops.table_accumulate_gradients(self.table.handle, found, grads / 2, scale=0.5)
            ops.table_apply_accumulated(self.table.handle, learning_rate=0.25, step=1)
        else:
            self.table.apply(found, grads, scale=0.5, learning_rate=0.25)
        self.oracle.apply([key for key, is_there in zip(received, has_row) if is_there], grads[has_row], 0.5, 0.25)

    def settle(self):
        """Makes the updates that wait. Rows of lookups under way may not be removed by hand."""
        while self.waiting:
            self._update(*self.waiting.pop(0))

    def find(self, batch):
        received = pack(batch)[2]
        want = self.oracle.find(received)
        if self.options.get("unknown") == "zeros":
            want = [row * (i in self.oracle.rows[s]) for row, (s, i) in zip(want, received)]
        self._check_rows(self.table.find(batch), want)

    def prefetch(self, batch):
        ops.table_prefetch(self.table.handle, *pack(batch)[:2])

    def remove(self, segment, removed):
        self.settle()
        count = ops.table_remove(self.table.handle, segment, np.array(removed, np.int64))
        assert count == self.oracle.remove(segment, removed)

    def evict(self, segment, count):
        assert ops.table_evict(self.table.handle, segment, count) == self.oracle.evict(segment, count)

    def forget_tombstones(self):
        ops.table_forget_tombstones(self.table.handle)
        self.oracle.forget_tombstones()

    def clear(self):
        self.settle()
        ops.table_clear(self.table.handle)
        self.oracle.clear()

    def count(self, segment, counted):
        """Sets the counts of ids without a row, as a load does. Some have one already."""
        counted = [i for i in dict.fromkeys(counted) if i not in self.oracle.rows[segment]]
        if self.oracle.admission_count[segment] > 1:
            counts = np.ones(len(counted), np.int64)
            ops.table_import_candidates(self.table.handle, segment, np.array(counted, np.int64), counts)
            self.oracle.candidates[segment].update(dict.fromkeys(counted, 1))

    def move_to_a_new_table(self):
        """Moves rows, candidates and the clock, like a checkpoint. Statistics and tombstones begin anew."""
        self.settle()
        self.coming, self.oracle.window = None, 1
        old, self.table = self.table, self._new_table()
        for segment in range(2):
            keys, handles = ops.table_keys(old.handle, segment)
            ops.table_import(self.table.handle, segment, keys, ops.table_read_records(old.handle, handles))
            ops.table_import_candidates(self.table.handle, segment, *ops.table_candidates(old.handle, segment))
        ops.table_set_clock(self.table.handle, ops.table_clock(old.handle))
        tf.raw_ops.DestroyResourceOp(resource=old.handle)
        self.oracle.forget_tombstones()
        for counters in self.oracle.counters:
            counters.update(dict.fromkeys(counters, 0))

    def check(self):
        """Compares every readable state."""
        handle = self.table.handle
        statistics = ops.table_statistics(handle)
        assert statistics.segments.numpy().tolist() == self.oracle.statistics()
        assert ops.table_clock(handle).numpy()[0] == self.oracle.clock
        pools = np.zeros(2, int)
        for segment in range(2):
            ids, records = self.table.records(segment, wide=["accumulator"] if self.adagrad else [])
            want = self.oracle.export(segment)
            assert ids.tolist() == [id_ for id_, _ in want]
            assert records["last"].tolist() == [row.last for _, row in want]
            assert records["count"].tolist() == [row.count for _, row in want]
            for field, numbers in [("row", "numbers"), *([("accumulator", "accumulator")] if self.adagrad else [])]:
                got = records[field]
                got = got.view(tf.bfloat16.as_numpy_dtype) if got.dtype == np.uint16 else got
                wanted = np.reshape([getattr(row, numbers) for _, row in want], [-1, DIM])
                np.testing.assert_array_equal(got.astype(np.float32), wanted)
            pools += np.bincount(records["pool"], minlength=2)
            if "tier_folder" not in self.options:
                assert records["pool"].tolist() == [int(not row.hot) for _, row in want]
            assert ops.table_tombstones(handle, segment).numpy().tolist() == self.oracle.tombstones(segment)
            candidates = [part.numpy().tolist() for part in ops.table_candidates(handle, segment)]
            assert list(zip(*candidates)) == self.oracle.export_candidates(segment)
        assert statistics.bytes.numpy()[3:].tolist() == pools.tolist()
        assert "tier_folder" not in self.options or pools[0] <= TIER_ROWS
        return pools

    @staticmethod
    def _check_rows(got, want):
        got = np.asarray(got)
        np.testing.assert_array_equal(got[: len(want)], np.reshape(want, [-1, DIM]))
        assert not got[len(want) :].any()


ids = st.lists(st.sampled_from(IDS), max_size=6)
batches = st.lists(st.tuples(ids, ids), min_size=1, max_size=3)
segments = st.sampled_from([0, 1])
forms = st.fixed_dictionaries(
    {"depth": st.sampled_from([1, 1, 2, 3]), **{name: st.booleans() for name in ("apart", "uses_ahead", "in_parts")}}
)
train = st.tuples(st.just("train"), batches, st.integers(-8, 8), forms)
operations = st.one_of(
    train, train,  # twice as often as the others
    st.tuples(st.just("look_ahead"), batches, st.booleans()),
    st.tuples(st.just("find"), batches),
    st.tuples(st.just("remove"), segments, ids),
    st.tuples(st.just("evict"), segments, st.integers(0, 5)),
    st.tuples(st.just("forget_tombstones")),
    st.tuples(st.just("clear")),
    st.tuples(st.just("count"), segments, ids),
    st.tuples(st.just("move_to_a_new_table")),
)  # fmt: skip


def by_segment(values):
    return st.lists(st.sampled_from(values), min_size=2, max_size=2)


policies = st.fixed_dictionaries(
    {
        "max_rows": by_segment([0, 0, 3, 6]),
        "eviction": by_segment(["none", "lru", "lfu"]),
        "ttl": by_segment([0, 0, 1, 3]),
        "admission_count": by_segment([1, 1, 2, 3]),
        "max_candidates": by_segment([0, 5]),
        "frequency_decay_steps": by_segment([0, 0, 1, 2, 5]),
        "hot_after": st.sampled_from([0, 0, 2, 3]),
        "record_tombstones": st.booleans(),
        "rule": st.sampled_from(["sgd", "adagrad"]),
        "unknown": st.sampled_from(["initial", "zeros"]),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [800, pytest.param(4000, marks=pytest.mark.nightly)])
def test_random_operations_agree_with_a_dictionary(sequences):
    done = 0

    @settings(
        max_examples=sequences, derandomize=True, deadline=None, database=None,
        phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(policies=policies, sequence=st.lists(operations, min_size=1, max_size=12))
    def sequence_agrees(policies, sequence):
        nonlocal done
        done += 1
        history = History(policies)
        try:
            for name, *arguments in sequence:
                forms = arguments.pop() if name == "train" else {}
                getattr(history, name)(*arguments, **forms)
            history.check()
        finally:
            history.destroy()

    sequence_agrees()
    assert done >= sequences


def long_options(random, folder):
    """Options of a table whose rows leave, move to a file, change their storage, or stay."""
    pick = lambda values: [values[random.integers(len(values))] for _ in range(2)]  # noqa: E731
    most = random.choice([24, 60]) if (tier := random.random() < 0.3) is False else 60
    chosen = pick([(0, "none"), (0, "none"), (most, "lfu"), (most, "lru")])
    storage = {"tier_folder": folder} if tier else {"hot_after": int(random.integers(0, 4))}
    if not tier and not storage["hot_after"]:
        storage["storage"] = str(random.choice(["float32", "float16", "bfloat16"]))
    return {
        "max_rows": [int(rows) for rows, _ in chosen], "eviction": [policy for _, policy in chosen],
        "ttl": pick([0, 0, 5, 32]), "admission_count": pick([1, 1, 2]), "max_candidates": pick([0, 40]),
        "frequency_decay_steps": pick([0, 1, 3, 7, 16, 100]), "record_tombstones": bool(random.random() < 0.5),
        "rule": str(random.choice(["sgd", "adagrad"])), **storage,
    }  # fmt: skip


def long_history(seed, folder, steps=60):
    """Ids come from a hot set that moves on. Returns counts of what the history has met."""
    random = np.random.default_rng(seed)
    history, in_file = History(long_options(random, folder)), 0

    def batch(step):
        draw = lambda: (step // 12 * 20 + random.geometric(0.25, random.integers(0, 5))).tolist()  # noqa: E731
        return [[draw() for _ in range(2)] for _ in range(random.integers(1, 3))]

    met = collections.Counter()
    for step in range(1, steps + 1):
        apart, uses_ahead, in_parts = random.random(3) < 0.4
        forms = {"depth": int(random.integers(1, 4)), "apart": apart, "uses_ahead": uses_ahead, "in_parts": in_parts}
        history.train(batch(step), int(random.integers(-8, 9)), **forms)
        history.find(batch(step))
        if random.random() < 0.3:
            history.look_ahead(batch(step + 1), random.random() < 0.5)
            history.prefetch(batch(step + 1))
        if step % 9 == 0:
            history.evict(int(random.integers(2)), int(random.integers(3)))
        if step % 14 == 0:
            history.remove(int(random.integers(2)), batch(step)[0][0])
        if step % 5 == 0:
            pools = history.check()
            in_file += "tier_folder" in history.options and pools[1] > 0
        if step == 40:
            for counters in history.oracle.counters:
                met.update(counters)
            history.move_to_a_new_table()
    met.update({"demotions": history.oracle.demotions, "in_file": in_file})
    history.destroy()
    return met


@pytest.mark.slow
def test_long_histories_agree_with_a_dictionary(tmp_path):
    met = sum((long_history(seed, str(tmp_path)) for seed in range(40)), collections.Counter())
    enough = {"demotions": 100, "in_file": 20, "evictions": 500, "refused": 500, "hits": 2000, "inserts": 2000}
    assert all(met[kind] > count for kind, count in enough.items()), met
    assert not list(tmp_path.iterdir()), "the file has no name"
