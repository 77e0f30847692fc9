"""FusedEmbedding with native tables: any id, lookups in training and evaluation, and options with their refusals."""

import dataclasses
import json

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.oracles.initial_rows import initial_row_oracle
from tests.support.ids import INT64_MIN
from tf_fusedrec import keras, ops, optimizers, tf
from tf_fusedrec.embedding.group import group_tables
from tf_fusedrec.files.hash_order import table_seed
from tf_fusedrec.tables.native import NativeTable


def table(name="t", dim=4, optimizer=None, **kwargs):
    return fr.TableConfig(name=name, dim=dim, optimizer=optimizer or optimizers.SGD(0.5), **kwargs)


def features_of(tables):
    return [fr.FeatureConfig(name=t.name, table=t.name) for t in tables]


def layer(*tables, **kwargs):
    return fr.FusedEmbedding(features_of(tables), tables, **kwargs)


def initial(i, name="t", dim=4):
    return initial_row_oracle("normal", 0.0, 0.05, table_seed(0, name) % 2**64, i, dim)


def statistics(emb):
    return emb.internals.groups[0].table.statistics["t"]


@pytest.mark.parametrize("freeze", ["training_argument", "layer_trainable", "keras_phase"])
def test_an_evaluation_inserts_nothing_touches_nothing_and_gives_initial_rows(freeze):
    emb = layer(table())
    emb({"t": tf.constant([1])})
    before = statistics(emb), emb.internals.groups[0].table.clock
    inputs = {"t": tf.constant([1, 2, INT64_MIN], tf.int64)}
    emb.trainable = freeze != "layer_trainable"
    with tf.GradientTape() as tape:
        training = {"training_argument": False, "layer_trainable": None, "keras_phase": 0}[freeze]
        loss = tf.reduce_sum(emb(inputs, training=training)["t"])
    assert tape.gradient(loss, emb.weights) == [None]
    rows = emb(inputs, training=False)["t"]
    np.testing.assert_allclose(rows, [initial(i) for i in (1, 2, INT64_MIN)], rtol=1e-6)
    assert (statistics(emb), emb.internals.groups[0].table.clock) == before
    emb.trainable = True
    np.testing.assert_array_equal(emb(inputs)["t"], rows)  # training inserts this row
    assert statistics(emb)["keys"] == 3


def test_keras_trains_in_fit_and_only_there():
    """After fit with validation, evaluate and predict, the table has rows of the training data only."""
    keras.utils.set_random_seed(0)
    emb = layer(table(optimizer=optimizers.Adagrad(0.5)))
    ids = keras.Input([], dtype=tf.int64)
    model = keras.Model(ids, keras.layers.Dense(1)(emb({"t": ids})["t"]))
    model.compile(keras.optimizers.Adam(0.05), "mse")
    x, y = np.arange(32), np.linspace(0, 1, 32)
    history = model.fit(x, y, batch_size=8, epochs=6, verbose=0, validation_data=(x + 100, y)).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    trained = emb.export_table("t")
    assert trained[0].tolist() == x.tolist()
    assert statistics(emb) == {
        "keys": 32, "hits": 5 * 32, "inserts": 32, "evictions": 0, "refused": 0, "candidates": 0, "left_out": 0
    }  # fmt: skip
    model.evaluate(x + 200, y, verbose=0)
    kernel, bias = model.layers[-1].get_weights()
    want = np.mean((trained[1] @ kernel[:, 0] + bias - y) ** 2)
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), want, rtol=1e-4)
    model.predict(x + 300, verbose=0)
    np.testing.assert_array_equal(emb.export_table("t")[1], trained[1])
    assert statistics(emb)["hits"] == 5 * 32 and statistics(emb)["keys"] == 32


RECORDS = [
    table("plain"),
    table("uniform", dim=8, initializer=fr.Uniform(maxval=1.0)),
    table("f16", storage=fr.Storage(dtype="float16", stochastic_rounding=True), dtype="bfloat16"),
    table("mixed", storage=fr.Storage(dtype="mixed", hot_after=7)),
    table("cooling", storage=fr.Storage(dtype="mixed", hot_after=7), limits=fr.Limits(frequency_decay_steps=12)),
    table("lru", limits=fr.Limits(max_rows_per_rank=10, eviction="lru"), record_tombstones=True),
    table(
        "lfu",
        limits=fr.Limits(max_rows_per_rank=10, eviction="lfu", ttl=30, admission_count=3, max_candidates_per_rank=99),
    ),
    table("tier", tier=fr.Tier(memory_budget_per_rank=1 << 20, folder="FOLDER")),
    table("host_rows", tier=fr.Tier(host_rows=True, hot_rows_per_rank=40)),
    table("sgd", optimizer=optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=1.5)),
    table(
        "adagrad",
        optimizer=optimizers.Adagrad(
            0.1, initial_accumulator_value=0.2, epsilon=0.01, epsilon_inside=True, clipnorm=0.5
        ),
    ),
    table(
        "rowwise",
        optimizer=optimizers.RowWiseAdagrad(
            0.1, initial_accumulator_value=0.2, epsilon=0.01, variant="hsp", moment_scale=0.5, clipnorm=0.5
        ),
    ),
    table("adam", optimizer=optimizers.Adam(0.1, beta_1=0.8, beta_2=0.9, epsilon=0.01, clipnorm=0.5)),
    table("adamw", optimizer=optimizers.AdamW(0.1, weight_decay=0.3, beta_1=0.8, beta_2=0.9, epsilon=0.01)),
    table(
        "ftrl",
        optimizer=optimizers.Ftrl(
            0.1, learning_rate_power=-0.4, initial_accumulator_value=0.2, l1=0.01, l2=0.02, l2_shrinkage=0.03, beta=0.04
        ),
    ),
    table("schedule", optimizer=optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5))),
]


@pytest.mark.parametrize("record", [*RECORDS, None], ids=lambda t: t.name if t else "keras")
def test_config_round_trip_through_json(record, tmp_path):
    record = record or table("keras", optimizer=keras.optimizers.Adagrad(0.3))  # has variables
    if record.tier.folder:
        record = dataclasses.replace(record, tier=dataclasses.replace(record.tier, folder=str(tmp_path)))
    emb = layer(record, accumulate_steps=2, gradient_op="sum", seed=5)
    # Keras wraps a layer's dicts, and has its own encoder for them.
    config = json.loads(json.dumps(emb.get_config(), default=lambda wrapped: wrapped.__wrapped__))
    again = fr.FusedEmbedding.from_config(config)
    assert again.get_config() == emb.get_config()
    (made,) = again.internals.groups[0].config.tables
    for field in dataclasses.fields(record):
        if field.name != "optimizer":
            assert getattr(made, field.name) == getattr(record, field.name)
    assert again.internals.groups[0].config.name == emb.internals.groups[0].config.name
    ids = {record.name: tf.constant([1, -5])}
    got, want = (e(ids)[record.name] for e in (again, emb))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(tf.cast(got, tf.float32), tf.cast(want, tf.float32))


def test_limits_and_a_budget_of_memory_share_a_group_and_other_fields_do_not():
    limits = {
        "ttl": fr.Limits(ttl=3), "rows": fr.Limits(max_rows_per_rank=3, eviction="lru"),
        "admission": fr.Limits(admission_count=2), "lfu": fr.Limits(max_rows_per_rank=3, eviction="lfu"),
    }  # fmt: skip
    tiers = {
        "tier1": fr.Tier(4096, "folder"), "tier2": fr.Tier(8192, "folder"), "host": fr.Tier(host_rows=True),
        "hot1": fr.Tier(host_rows=True, hot_rows_per_rank=30), "hot2": fr.Tier(host_rows=True, hot_rows_per_rank=9),
    }  # fmt: skip
    tables = [table("a"), table("b"), table("half", storage=fr.Storage("float16"))]
    tables += [table("tombstones", record_tombstones=True), *(table(n, limits=of) for n, of in limits.items())]
    tables += [table(name, tier=tier) for name, tier in tiers.items()]
    groups = [tuple(t.name for t in group.tables) for group in group_tables(tables, features_of(tables))]
    assert groups == [
        ("a", "admission", "b", "lfu", "rows", "ttl"), ("half",), ("host",), ("hot1", "hot2"),
        ("tier1", "tier2"), ("tombstones",),
    ]  # fmt: skip


def test_one_rule_may_serve_tables_of_several_groups():
    """A record has no state, unlike a TF1 optimizer. Each group counts its own updates."""
    rule = optimizers.Adam(0.1)
    emb = layer(table("a", optimizer=rule), table("b", dim=8, optimizer=rule))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(emb({"a": tf.constant([1])})["a"])
    tape.gradient(loss, emb.trainable_variables)
    assert [int(emb.optimizers[name].iterations) for name in "ab"] == [1, 0]


@pytest.mark.parametrize("record", [t for t in RECORDS if t.options], ids=lambda t: t.name)
def test_fields_of_native_tables_are_refused_by_the_other_backend(record):
    record = dataclasses.replace(record, optimizer=keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match=f"table '{record.name}' has .*which need backend='native'") as error:
        layer(record, backend="tfra")
    assert all(path in str(error.value) for path in record.options)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"storage": fr.Storage(dtype="int8")}, "storage.dtype must be one of .*'mixed'.*got 'int8' for table 't'"),
        ({"limits": fr.Limits(eviction="fifo")}, "eviction must be one of .*got 'fifo'"),
        (
            {"limits": fr.Limits(eviction="lru")},
            "limits.eviction of table 't' is 'lru' with limits.max_rows_per_rank 0: a policy",
        ),
        (
            {"limits": fr.Limits(9, "lru", frequency_decay_steps=9)},
            "decay_steps of table 't' is 9 with limits.eviction",
        ),
        (
            {"tier": fr.Tier(hot_rows_per_rank=-1, host_rows=True)},
            r"tier.hot_rows_per_rank of table 't' must be an int in \[0, .* got -1",
        ),
        (
            {"tier": fr.Tier(hot_rows_per_rank=5)},
            "tier.hot_rows_per_rank of table 't' is 5 with tier.host_rows False: .* Use host_rows",
        ),
        (
            {"storage": fr.Storage("mixed")},
            "storage.hot_after of table 't' is 0 with storage.dtype 'mixed': a number > 0",
        ),
        ({"storage": fr.Storage(hot_after=3)}, "storage.hot_after of table 't' is 3 with storage.dtype 'float32'"),
        (
            {"tier": fr.Tier(memory_budget_per_rank=10)},
            "tier.memory_budget_per_rank of table 't' is 10 with tier.folder '': a budget needs",
        ),
        (
            {"tier": fr.Tier(folder="x")},
            "tier.memory_budget_per_rank of table 't' is 0 with tier.folder 'x': a folder needs",
        ),
        ({"tier": fr.Tier(9, "x"), "storage": fr.Storage("mixed", hot_after=2)}, "a budget does not work with 'mixed'"),
        ({"storage": fr.Storage(stochastic_rounding=True)}, "stochastic_rounding of table 't' is True with .*16-bit"),
        ({"limits": fr.Limits(ttl=1.5)}, "limits.ttl must be int, got 1.5 for table 't'"),
        ({"limits": fr.Limits(ttl=True)}, "limits.ttl must be int, got True for table 't'"),
        ({"limits": fr.Limits(admission_count=0)}, r"admission_count of table 't' must be an int in \[1, .* got 0"),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        table(**fields)


def lookup_and_tape(emb, ids):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(emb({"t": tf.constant(ids, tf.int64)})["t"])
    return lambda: tape.gradient(loss, emb.trainable_variables)


def test_rows_whose_gradients_wait_stay_whatever_is_looked_up_meanwhile():
    """Untrained lookups fill the table. By LFU and the window alone, the waiting rows would leave first."""
    emb = layer(
        table(initializer=fr.Zeros(), limits=fr.Limits(max_rows_per_rank=8, eviction="lfu")),
        accumulate_steps=2,
        gradient_op="sum",
    )
    for _ in range(2):
        lookup_and_tape(emb, [10, 11, 12, 13])()  # frequent and trained, so it may leave
    lookup_and_tape(emb, [1, 2])()
    for ids in ([3], [4], [5], [6]):
        emb({"t": tf.constant(ids)})
    with pytest.raises(tf.errors.FailedPreconditionError, match="cannot be removed while accumulated gradients wait"):
        emb.internals.groups[0].table.remove("t", np.array([1]))
    lookup_and_tape(emb, [1])()
    ids, rows = emb.export_table("t")
    by_id = dict(zip(ids.tolist(), rows[:, 0].tolist()))
    assert len(by_id) == 8 and (by_id[1], by_id[2]) == (-1.0, -0.5)
    emb.internals.groups[0].table.remove("t", np.array([1]))  # no gradient waits
    assert 1 not in emb.export_table("t")[0]


def test_a_table_deleted_during_tracing_is_freed_outside_the_graph():
    """The collector runs at any time. Otherwise an export captures the handle, or a step never frees the table."""
    for graph in (tf.Graph(), tf.__internal__.FuncGraph("step")):
        tables = [NativeTable("goes", [table()], seed=0)]
        handle = tables[0]._handle
        with graph.as_default():
            tables.clear()
        assert graph.get_operations() == []
        with pytest.raises(tf.errors.NotFoundError):
            ops.table_statistics(handle).segments[:, 0]
