"""Random sequences of operations on a table, whatever its policies, agree with a dictionary (tests/oracles)."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.oracles.hash_table import Exhausted, TableOracle, pack
from tests.oracles.initial_rows import initial_row_oracle
from tests.support.ids import INT64_MAX, INT64_MIN
from tests.support.table_records import arguments_of
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.files.hash_order import mix64

DIM, SEEDS = 3, [5, -6]
IDS = [*range(12), -1, INT64_MIN, INT64_MAX, 1 << 40]


@functools.cache
def initial(key):
    """Returns an initial row between 0 and 1, equal in float32 and double, see test_hash_table.py."""
    segment, id_ = key
    return initial_row_oracle("uniform", 0.0, 1.0, SEEDS[segment], id_, DIM)


ids = st.lists(st.sampled_from(IDS), max_size=6)
batches = st.lists(st.tuples(ids, ids), min_size=1, max_size=3)
segments = st.sampled_from([0, 1])
operations = st.one_of(
    st.tuples(st.just("train"), batches, st.integers(-8, 8)),
    st.tuples(st.just("train"), batches, st.integers(-8, 8)),  # twice as often as the others
    st.tuples(st.just("find"), batches),
    st.tuples(st.just("remove"), segments, ids),
    st.tuples(st.just("evict"), segments, st.integers(0, 5)),
    st.tuples(st.just("forget_tombstones")),
    st.tuples(st.just("clear")),
    st.tuples(st.just("move_to_a_new_table")),
)


def by_segment(values):
    return st.lists(st.sampled_from(values), min_size=2, max_size=2)


policies = st.fixed_dictionaries(
    {
        "max_rows": by_segment([0, 0, 3, 6]),
        "eviction": by_segment(["none", "lru", "lfu"]),
        "ttl": by_segment([0, 0, 1, 3]),
        "admission_count": by_segment([1, 1, 2, 3]),
        "max_candidates": by_segment([0, 64]),
        "frequency_decay_steps": by_segment([0, 0, 1, 2, 5]),
        "hot_after": st.sampled_from([0, 0, 2, 3]),
        "record_tombstones": st.booleans(),
        "window": st.sampled_from([1, 1, 2]),
    }
)


@dataclasses.dataclass
class Pair:
    """Runs the same operations on a table and its oracle."""

    policies: dict
    number: int  # number of the sequence, for the resource's name
    moved: int = 0

    def __post_init__(self):
        self.table = self._new_table()
        self.oracle = TableOracle(2, initial, **self.policies)

    def _new_table(self):
        return ops.hash_table(
            **arguments_of(
                shared_name=f"properties/{self.number}/{self.moved}", dim=DIM, seeds=SEEDS, rule="sgd",
                hyperparameters=[0.0], distribution="uniform", a=0.0, b=1.0, **self.policies,
            )
        )  # fmt: skip

    def destroy(self):
        tf.raw_ops.DestroyResourceOp(resource=self.table)

    def train(self, batch, number):
        message, splits, received = pack(batch)
        try:
            rows = self.oracle.lookup(received)
        except Exhausted:
            try:
                ops.table_lookup(self.table, message, splits, dim=DIM)
            except tf.errors.ResourceExhaustedError:
                return
            raise AssertionError("a batch that does not fit was taken") from None
        found = ops.table_lookup(self.table, message, splits, dim=DIM)
        self._check_rows(found.rows, rows)
        handles = found.handles.numpy()[found.inverse.numpy()]
        for key, handle in zip(received, handles):
            assert (handle == -1) == (key[1] not in self.oracle.rows[key[0]])
        assert len({(handle, key if handle == -1 else 0) for key, handle in zip(received, handles)}) == len(
            set(received)
        )
        # Multiples of 1/64 make sums exact. Each column and position has another number.
        grads = (number + np.arange(len(received) * DIM).reshape(-1, DIM) % 7).astype(np.float32) / 64
        ops.table_apply_gradients(self.table, found, grads, scale=0.5, learning_rate=0.25, step=1)
        self.oracle.apply(received, grads, 0.5, 0.25)

    def find(self, batch):
        message, splits, received = pack(batch)
        self._check_rows(ops.table_read(self.table, message, splits, dim=DIM), self.oracle.find(received))

    def remove(self, segment, removed):
        assert ops.table_remove(self.table, segment, np.array(removed, np.int64)) == self.oracle.remove(
            segment, removed
        )

    def evict(self, segment, count):
        assert ops.table_evict(self.table, segment, count) == self.oracle.evict(segment, count)

    def forget_tombstones(self):
        ops.table_forget_tombstones(self.table)
        self.oracle.forget_tombstones()

    def clear(self):
        ops.table_clear(self.table)
        self.oracle.clear()

    def move_to_a_new_table(self):
        """Moves rows, candidates and the clock, like a checkpoint. Statistics and tombstones begin anew."""
        self.moved += 1
        old, self.table = self.table, self._new_table()
        for segment in range(2):
            keys, handles = ops.table_keys(old, segment)
            ops.table_import(self.table, segment, keys, ops.table_read_records(old, handles))
            ops.table_import_candidates(self.table, segment, *ops.table_candidates(old, segment))
        ops.table_set_clock(self.table, ops.table_clock(old))
        tf.raw_ops.DestroyResourceOp(resource=old)
        self.oracle.forget_tombstones()
        for counters in self.oracle.counters:
            counters.update(dict.fromkeys(counters, 0))

    def check(self):
        """Compares every readable state."""
        assert ops.table_size(self.table).numpy().tolist() == [len(rows) for rows in self.oracle.rows]
        assert ops.table_statistics(self.table).segments.numpy().tolist() == self.oracle.statistics()
        assert ops.table_clock(self.table).numpy()[0] == self.oracle.clock
        record = np.dtype(
            [("last", "<u4"), ("count", "<u4"), ("updated", "<u4"), ("pool", "<u4"), ("row", "<f4", (DIM,))]
        )
        for segment in range(2):
            keys, handles = (tensor.numpy() for tensor in ops.table_keys(self.table, segment))
            order = np.argsort(mix64(keys))
            records = ops.table_read_records(self.table, handles[order]).numpy().view(record)[:, 0]
            want = self.oracle.export(segment)
            assert keys[order].tolist() == [id_ for id_, _ in want]
            assert records["last"].tolist() == [row.last for _, row in want]
            assert records["count"].tolist() == [row.count for _, row in want]
            assert records["pool"].tolist() == [int(not row.hot) for _, row in want]
            np.testing.assert_array_equal(records["row"], np.reshape([row.numbers for _, row in want], [-1, DIM]))
            assert ops.table_tombstones(self.table, segment).numpy().tolist() == self.oracle.tombstones(segment)
            candidates = [part.numpy().tolist() for part in ops.table_candidates(self.table, segment)]
            assert list(zip(*candidates)) == self.oracle.export_candidates(segment)

    @staticmethod
    def _check_rows(got, want):
        np.testing.assert_array_equal(got[: len(want)], np.reshape(want, [-1, DIM]))
        assert not got.numpy()[len(want) :].any()


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
        pair = Pair(policies, done)
        try:
            for name, *arguments in sequence:
                getattr(pair, name)(*arguments)
            pair.check()
        finally:
            pair.destroy()

    sequence_agrees()
    assert done >= sequences
