"""FusedEmbedding with native tables: any id, lookups in training and evaluation, and options with their refusals."""

import dataclasses
import json

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.oracles.initial_rows import initial_row_oracle
from tests.support.ids import INT64_MIN
from tests.support.layers import layer_of, train
from tf_fusedrec import keras, ops, optimizers, tf
from tf_fusedrec.files.hash_order import table_seed
from tf_fusedrec.tables.native import NativeTable


def table(name="t", dim=4, optimizer=None, **kwargs):
    return fr.TableConfig(name=name, dim=dim, optimizer=optimizer or optimizers.SGD(0.5), **kwargs)


def initial(i, name="t", dim=4):
    return initial_row_oracle("normal", 0.0, 0.05, table_seed(0, name) % 2**64, i, dim)


def statistics(emb):
    return emb.internals.groups[0].table.statistics["t"]


def state(emb, backend):
    of_native = (statistics(emb), emb.internals.groups[0].table.clock) if backend == "native" else ()
    return emb.export_table("t")[0].tolist(), *of_native


@pytest.mark.parametrize("backend", ["native", "tfra"])
@pytest.mark.parametrize("freeze", ["training_argument", "layer_trainable", "keras_phase"])
def test_an_evaluation_inserts_nothing_touches_nothing_and_gives_initial_rows(freeze, backend):
    emb = layer_of(table(optimizer=keras.optimizers.SGD(0.5)), backend=backend)
    train(emb, {"t": tf.constant([5])})
    before = state(emb, backend)
    inputs = {"t": tf.constant([1, 2, INT64_MIN], tf.int64)}
    emb.trainable = freeze != "layer_trainable"
    with tf.GradientTape() as tape:
        training = {"training_argument": False, "layer_trainable": None, "keras_phase": 0}[freeze]
        loss = tf.reduce_sum(emb(inputs, training=training)["t"])
    assert tape.gradient(loss, emb.weights) == [None]
    rows = emb(inputs, training=False)["t"]
    np.testing.assert_allclose(rows, [initial(i) for i in (1, 2, INT64_MIN)], rtol=1e-6)
    assert state(emb, backend) == before and (freeze != "layer_trainable" or not emb.trainable_variables)
    emb.trainable = True
    np.testing.assert_array_equal(train(emb, inputs)["t"], rows)  # training inserts this row
    assert len(emb.export_table("t")[0]) == 4


def test_keras_trains_in_fit_and_only_there():
    """After fit with validation, evaluate and predict, the table has rows of the training data only."""
    keras.utils.set_random_seed(0)
    emb = layer_of(table(optimizer=optimizers.Adagrad(0.5)))
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
    # tests/optimizers has the round trip of every rule.
    table("rule", optimizer=optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=1.5)),
    table("schedule", optimizer=optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5))),
]


@pytest.mark.parametrize("record", [*RECORDS, None], ids=lambda t: t.name if t else "keras")
def test_config_round_trip_through_json(record, tmp_path):
    record = record or table("keras", optimizer=keras.optimizers.Adagrad(0.3))  # has variables
    if record.tier.folder:
        record = dataclasses.replace(record, tier=dataclasses.replace(record.tier, folder=str(tmp_path)))
    emb = layer_of(record, accumulate_steps=2, gradient_op="sum", seed=5)
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


def test_one_rule_may_serve_tables_of_several_groups():
    """A record has no state, unlike a TF1 optimizer. Each group counts its own updates."""
    rule = optimizers.Adam(0.1)
    emb = layer_of(table("a", optimizer=rule), table("b", dim=8, optimizer=rule))
    train(emb, {"a": tf.constant([1])})
    assert [int(emb.optimizers[name].iterations) for name in "ab"] == [1, 0]


@pytest.mark.parametrize("record", [t for t in RECORDS if t.options], ids=lambda t: t.name)
def test_fields_of_native_tables_are_refused_by_the_other_backend(record):
    record = dataclasses.replace(record, optimizer=keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match=f"table '{record.name}' has .*which need backend='native'") as error:
        layer_of(record, backend="tfra")
    assert all(path in str(error.value) for path in record.options)


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
