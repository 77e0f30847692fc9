"""Options of tables reach the op from the layer, each table's own. tests/ops/hash_table draws all of them."""

import dataclasses

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.oracles.hash_table import TableOracle
from tests.oracles.initial_rows import initial_row_oracle
from tests.support.ids import INT64_MAX, INT64_MIN
from tests.support.layers import layer_of, train
from tf_fusedrec import keras, optimizers, tf
from tf_fusedrec.data import lookahead
from tf_fusedrec.files.hash_order import table_seed
from tf_fusedrec.tables import places

TABLES, STEPS, DIM, RATE = 12, 60, 3, 0.25
EXTREME = {-2: INT64_MIN, 0: INT64_MAX}  # each is an id like any other
NAMES = [f"t{n:02}" for n in range(TABLES)]


def limits_of(n):
    """No two tables have equal limits, and all policies meet."""
    limits = {"ttl": (0 if n < 6 else 20 + n, 2 + n // 3, 32 + n)[n % 3], "admission_count": 1 + n % 5 % 3}
    if n % 4 < 3:
        limits.update(max_rows_per_rank=10 + n // 3, eviction=("lru", "lfu", "lru")[n % 4])
    if n % 4 == 1:
        limits["frequency_decay_steps"] = 2 + n
    if n % 5 == 2:
        limits["max_candidates_per_rank"] = 3 + n
    return limits


def test_tables_of_one_group_have_their_limits():
    limits = [limits_of(n) for n in range(TABLES)]
    options = {"optimizer": optimizers.SGD(RATE), "initializer": fr.Uniform(0.0, 1.0), "record_tombstones": True}
    layer = layer_of(*(fr.TableConfig(name, DIM, limits=fr.Limits(**of), **options) for name, of in zip(NAMES, limits)))
    (table,) = [group.table for group in layer.internals.groups]
    default = {"eviction": "none", "admission_count": 1}
    fields = {field: [of.get(field, default.get(field, 0)) for of in limits] for of in limits for field in of}
    oracle = TableOracle(
        TABLES,
        lambda key: initial_row_oracle("uniform", 0, 1, table_seed(0, NAMES[key[0]]) % 2**64, key[1], DIM),
        record_tombstones=True,
        **{field.removesuffix("_per_rank"): values for field, values in fields.items()},
    )
    random = np.random.default_rng(5)
    for step in range(STEPS):
        batch = [(random.zipf(1.4, random.integers(0, 8)) % 50 - 2).tolist() for _ in NAMES]
        batch = [[EXTREME.get(i, i) for i in ids] if step % 20 != 19 else [] for ids in batch]
        received = [(s, i) for s, ids in enumerate(batch) for i in ids]
        grads = random.integers(-8, 9, [len(received), DIM]).astype(np.float32) / 64  # their sums are exact
        with tf.GradientTape() as tape:
            rows = layer({name: tf.constant(ids, tf.int64) for name, ids in zip(NAMES, batch)})
            rows = tf.concat([rows[name] for name in NAMES], 0)
            loss = tf.reduce_sum(rows * grads)
        tape.gradient(loss, layer.trainable_variables)
        np.testing.assert_array_equal(rows, np.reshape(oracle.lookup(received), [-1, DIM]))
        oracle.apply(received, grads, 1.0, RATE)
    counts = oracle.statistics()
    assert [list(of.values()) for of in table.statistics.values()] == [[*of_table, 0] for of_table in counts]
    assert min(sum(of[kind] for of in counts) for kind in (3, 4, 5)) > 5, "the case is too easy"
    for s, name in enumerate(NAMES):
        want = oracle.export(s)
        ids, records = table.snapshot(name)
        assert ids.tolist() == [i for i, _ in want]
        for field, values in (
            ("last", [row.last for _, row in want]), ("count", [row.count for _, row in want]),
            ("row", np.reshape([row.numbers for _, row in want], [-1, DIM])),
        ):  # fmt: skip
            np.testing.assert_array_equal(records[field], values, err_msg=f"{field} of {name}")
        assert table.tombstones(name).tolist() == oracle.tombstones(s)
        exported_ids, rows = layer.export_table(name)
        assert dict(zip(exported_ids.tolist(), rows.tolist())) == dict(zip(ids.tolist(), records["row"].tolist()))


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "row_bytes"), [(optimizers.RowWiseAdagrad(0.1), 32), (optimizers.Adam(0.1), 52)])
def test_rows_beyond_memory_and_a_look_ahead_in_a_graph_change_nothing(rule, row_bytes, tmp_path):
    """Runs the loop of the documentation, with two batches ahead and no prefetch at the end."""

    def made(**options):
        return layer_of(fr.TableConfig("t", DIM, rule, **options), accumulate_steps=3, name=f"of_{len(options)}")

    def batches():
        random = np.random.default_rng(3)
        for n in range(40):
            yield {"t": np.concatenate([(random.zipf(1.2, 20) + 37 * n) % 500, random.integers(0, 500, 10)])}

    tiered, plain = made(tier=fr.Tier(150 * row_bytes, str(tmp_path))), made()

    @tf.function(reduce_retracing=True)
    def step(batch, coming):
        tiered.prefetch(coming)
        train(tiered, batch, lambda rows: tf.reduce_sum(rows**2))

    source = tf.data.Dataset.from_generator(batches, output_signature={"t": tf.TensorSpec([None], tf.int64)})
    for batch, coming in lookahead(source, steps=2):
        step(batch, coming)
        train(plain, batch, lambda rows: tf.reduce_sum(rows**2))
        evaluated = [layer({"t": tf.range(500, dtype=tf.int64)}, training=False)["t"] for layer in (tiered, plain)]
        np.testing.assert_array_equal(*evaluated)
    got, want = (layer.internals.groups[0].table for layer in (tiered, plain))
    assert got.memory["rows"] <= 150 < got.memory["second_rows"] and got.statistics == want.statistics
    (ids, records), (want_ids, want_records) = got.snapshot("t"), want.snapshot("t")
    np.testing.assert_array_equal(ids, want_ids)
    for field in {*records.dtype.names} - {"pool"}:
        np.testing.assert_array_equal(records[field], want_records[field], err_msg=field)
    plain.prefetch({"t": tf.constant([1])})  # without a file there is nothing to read
    assert plain.statistics()["t"] == got.statistics["t"]
    with pytest.raises(ValueError, match=r"hold unknown features \['c'\]"):
        tiered.prefetch({"c": tf.constant([1])})


@pytest.mark.parametrize("first", [0, 1])
def test_what_a_place_lacks_is_refused_whichever_table_has_it(first):
    plain = fr.TableConfig("plain", DIM, optimizers.SGD(0.1))
    counted = fr.TableConfig("counted", DIM, optimizers.SGD(0.1), limits=fr.Limits(admission_count=2))
    tables = [plain, counted][:: 1 - 2 * first]
    host_rows = [dataclasses.replace(table, tier=fr.Tier(host_rows=True)) for table in tables]
    records = lambda of, **group: [table.record(**group) for table in of]  # noqa: E731
    places.check(places.DEVICE, records(tables), accumulate_steps=1)
    with pytest.raises(ValueError, match="admission_count of table 'counted' is 2, and must be 1 on a GPU"):
        places.check(places.HOST_ROWS, records(host_rows), accumulate_steps=1)
    with pytest.raises(ValueError, match="must be 1 where replicas are averaged"):
        places.check(places.CPU, records(tables, averaged=True), accumulate_steps=1)
    with pytest.raises(ValueError, match="rule 'weight_sync'.*Use Topology.rule='gradient_sync'"):
        places.check(places.HOST_ROWS, records(host_rows[:1], averaged=True), accumulate_steps=1)


def test_a_record_shows_what_differs_from_its_defaults():
    item = fr.TableConfig("item", 8, keras.optimizers.Adam(0.1), limits=fr.Limits(ttl=3))
    text = "TableConfig(name='item', dim=8, optimizer=Adam, limits=Limits(ttl=3))"
    assert repr(item) == text and repr(fr.Tier()) == "Tier()"
    assert repr(fr.FeatureConfig("f", item, "mean")) == f"FeatureConfig(name='f', table={text}, combiner='mean')"
