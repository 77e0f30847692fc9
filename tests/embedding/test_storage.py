"""storage_dtype: rows of 16 bits, stochastic rounding, and hot rows in float32 beside cold ones in float16."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.oracles.initial_rows import initial_row_oracle
from tests.oracles.storage import StorageOracle, rounded
from tf_fusedrec import optimizers, tf
from tf_fusedrec.files.hash_order import table_seed

DIM = 5
RULES = {
    "sgd": lambda rate: optimizers.SGD(rate),
    "adagrad": lambda rate: optimizers.Adagrad(rate, 0.1),
    "rowwise": lambda rate: optimizers.RowWiseAdagrad(rate, variant="2d_sp"),
}


def layer(rule="sgd", rate=0.125, dim=DIM, **table):
    config = fr.TableConfig(name="t", dim=dim, optimizer=RULES[rule](rate), **table)
    return fr.FusedEmbedding([config], [fr.FeatureConfig(name="f", table="t")])


def table_of(emb):
    return emb.internals.groups[0].table


def train(emb, ids, grads):
    """Makes one step with given gradients. Returns the rows of the lookup."""
    with tf.GradientTape() as tape:
        rows = emb({"f": tf.constant(ids, tf.int64)})["f"]
        loss = tf.reduce_sum(tf.cast(rows, tf.float32) * tf.constant(grads, tf.float32))
    tape.gradient(loss, emb.trainable_variables)
    return rows.numpy()


def initial(i):
    return initial_row_oracle("normal", 0.0, 0.05, table_seed(0, "t") % 2**64, i, DIM)


def steps(seed, count, dim=DIM, vocabulary=40):
    """Yields batches of skewed ids with gradients on a coarse grid, whose sums are exact in any order."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        ids = (random.zipf(1.4, 6) % vocabulary).tolist()
        yield ids, random.integers(-8, 9, (len(ids), dim)) / 16.0


def summed(ids, grads):
    sums = {}
    for i, g in zip(ids, grads):
        sums[i] = sums.get(i, 0.0) + g
    return sums


def assert_rows_are(got, want, storage, exact):
    """Asserts that `got` lies on its storage's grid and equals `want`, or without `exact` is one grid step away."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_array_equal(got, rounded(got, storage))
    if exact:
        np.testing.assert_array_equal(got, want)
    # A hot float32 row may differ in its last bits, because it had 16 bits before.
    np.testing.assert_allclose(
        got, want, rtol=2.0 ** -{"float32": 10, "float16": 10, "bfloat16": 7}[storage], atol=1e-7
    )


STORAGES = [
    pytest.param({"storage": fr.Storage(dtype="float16")}, id="float16"),
    pytest.param({"storage": fr.Storage(dtype="bfloat16")}, id="bfloat16"),
    pytest.param({"dtype": "bfloat16"}, id="bfloat16_to_the_model"),
    pytest.param({"storage": fr.Storage(dtype="mixed", hot_after=4)}, id="mixed"),
    pytest.param(
        {"storage": fr.Storage(dtype="mixed", hot_after=3), "limits": fr.Limits(frequency_decay_steps=9)},
        id="mixed_with_decay",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", STORAGES)
def test_rows_train_as_the_oracle_that_rounds_after_every_update(options, rule):
    """Compares lookups, rows, slots, and the set of hot rows, after each of 40 steps."""
    emb = layer(rule, **options)
    storage = options.get("storage", fr.Storage("bfloat16"))
    cold = "float16" if storage.dtype == "mixed" else storage.dtype
    oracle = StorageOracle(
        initial,
        rule,
        0.125,
        cold,
        storage.hot_after,
        options.get("limits", fr.Limits()).frequency_decay_steps,
    )
    # SGD is exact in float32 before it is rounded. A quotient may differ in its last float32 bit, which decides a
    # rounding to 16 bits once in some thousand times, and is then carried on.
    exact = rule == "sgd"
    for ids, grads in steps(len(rule), 40):
        want = oracle.lookup(ids)
        for i, row in zip(ids, train(emb, ids, grads)):
            assert_rows_are(row, want[i], "float32" if i in oracle.hot() else cold, exact)
        oracle.update(summed(ids, grads))
    ids, records = table_of(emb).snapshot("t")
    assert set(ids.tolist()) == set(oracle.rows)
    if oracle.hot_after:
        assert set(ids[records["pool"] == 0].tolist()) == oracle.hot()
        assert 3 < len(oracle.hot()) < len(ids) - 3 or oracle.demotions > 3, "the case is too easy"
    for i, row in zip(*emb.export_table("t")):
        assert_rows_are(row, oracle.rows[i], "float32" if i in oracle.hot() else cold, exact)
    if rule != "sgd":
        slots = records["accumulator"]
        slots = slots.view(tf.bfloat16.as_numpy_dtype) if slots.dtype == np.uint16 else slots
        want = np.array([oracle.slots[i] for i in ids.tolist()])
        np.testing.assert_allclose(np.float32(slots), want, rtol=1e-6 if rule == "rowwise" else 2**-7)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_keeps_its_value_when_it_becomes_hot(rule):
    """The lookup that moves a row returns the result of the previous update, bit for bit, and keeps its slots."""
    emb = layer(rule, storage=fr.Storage(dtype="mixed", hot_after=3))
    grads = np.array([[0.3, -0.7, 0.11, 0.5, -0.05], [1, 1, 1, 1, 1]])
    for _ in range(2):
        train(emb, [7, 8], grads)
    before = table_of(emb).snapshot("t")[1]
    assert before["pool"].tolist() == [1, 1] and table_of(emb).memory["rows"] == 0
    np.testing.assert_array_equal(emb({"f": tf.constant([7, 8])}, training=False)["f"], emb.export_table("t")[1])
    emb({"f": tf.constant([7])})
    ids, after = table_of(emb).snapshot("t")
    assert after["pool"].tolist() == [0 if i == 7 else 1 for i in ids.tolist()]
    assert (table_of(emb).memory["rows"], table_of(emb).memory["second_rows"]) == (1, 1)
    for field in ("row", *({"accumulator"} & set(after.dtype.names)), "updated"):
        np.testing.assert_array_equal(after[field], before[field])
    # From here on nothing is rounded: an update far below a step of float16 is kept.
    tiny = np.full((1, DIM), 1e-5)
    value = emb.export_table("t")[1][0]
    train(emb, [7], tiny)
    assert (emb.export_table("t")[1][0] != value).all()


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_stochastic_rounding_keeps_small_updates_on_average(storage):
    """64 updates of 1/16 of a step should make 4 steps. The nearest makes none, stochastic rounding about 4."""
    step = 2.0 ** -(10 if storage == "float16" else 7)  # of numbers in [1, 2)
    ids, dim, count = list(range(40)), 64, 64
    rows = {}
    for stochastic in (False, True):
        initializer = fr.Uniform(minval=1.25, maxval=1.75)
        emb = layer("sgd", 1.0, dim, storage=fr.Storage(storage, stochastic), initializer=initializer)
        before = emb({"f": tf.constant(ids)})["f"].numpy()
        for _ in range(count):
            train(emb, ids, np.full((len(ids), dim), -step / 16))
        rows[stochastic] = emb.export_table("t")[1] - before
    assert not rows[False].any()
    steps_made = rows[True] / step
    np.testing.assert_array_equal(steps_made, np.round(steps_made))
    # Each of 64 roundings goes up with probability 1/16: a number's variance is 64 * 15/256 = 3.75. Numbers that are
    # equal in a column round alike, so the 2,560 are worth fewer; 0.5 is 13 deviations of the mean of independent ones.
    assert abs(steps_made.mean() - 4) < 0.5 and 1.0 < steps_made.std() < 3.0


def test_initial_rows_are_rounded_alike_whenever_they_come():
    """Stochastic rounding draws from the number, its column and the time. Initial rows ignore the time."""
    emb = layer(
        "sgd",
        storage=fr.Storage(dtype="bfloat16", stochastic_rounding=True),
        limits=fr.Limits(max_rows=4, eviction="lru"),
    )
    first = emb({"f": tf.constant([1, 2, 3])})["f"].numpy()
    for n in range(10, 20):
        emb({"f": tf.constant([n, n + 1])})
    assert not {1, 2, 3} & set(emb.export_table("t")[0].tolist())
    np.testing.assert_array_equal(emb({"f": tf.constant([1, 2, 3])})["f"], first)
    other = layer("sgd", storage=fr.Storage(dtype="bfloat16", stochastic_rounding=True))
    other({"f": tf.constant([9])})
    np.testing.assert_array_equal(other({"f": tf.constant([3, 2, 1])})["f"][::-1], first)


@pytest.mark.parametrize("rule", ["rowwise", "adagrad"])
def test_an_all_cold_table_takes_at_most_55_percent(rule):
    """Counts the mapped bytes of 131,072 more rows at D = 64: header and payload, rounded up to the row's alignment."""
    dim, rows = 64, 1 << 17
    per_row = {}
    for name, options in (("wide", {}), ("cold", {"storage": fr.Storage(dtype="mixed", hot_after=1 << 30)})):
        emb = layer(rule, dim=dim, initializer=fr.Zeros(), **options)
        mapped = []
        for n in (1, 2):
            emb({"f": tf.range((n - 1) * rows, n * rows, dtype=tf.int64)})
            memory = table_of(emb).memory
            mapped.append(memory["row_bytes"] + memory["second_row_bytes"])
        assert memory["rows" if name == "wide" else "second_rows"] == 2 * rows
        per_row[name] = (mapped[1] - mapped[0]) / rows
    header, slots = 16, 4 if rule == "rowwise" else 0  # of row-wise slots: float32 in both
    numbers = dim * (1 if rule == "rowwise" else 2)
    want = {"wide": header + 4 * numbers + slots, "cold": header + 2 * numbers + slots}
    for name, bytes_per_row in per_row.items():
        assert 0 <= bytes_per_row - want[name] < 8, (name, bytes_per_row)
    assert per_row["cold"] <= 0.55 * per_row["wide"]
