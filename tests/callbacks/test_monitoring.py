"""A fit on two ranks writes the counts of NumPy for TensorBoard, and all ranks stop together."""

import types

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.embedding.test_mixed_precision import Clicks, batches, overflowing, policy
from tests.oracles.rank_partition import mix64
from tests.support.layers import layer_of, train
from tests.support.ranks import run_ranks
from tests.support.tensorboard import scalars
from tf_fusedrec import callbacks, keras, tf
from tf_fusedrec._tf_compat import keras_api
from tf_fusedrec.callbacks.timeline import Timeline
from tf_fusedrec.models.utilization import ModelFlopsUtilization

STEPS, DIM = 6, 16


class Counted(Clicks):
    """Counts tokens and FLOPs for Throughput and ModelFlopsUtilization."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.counts = [keras.metrics.Sum(name="tokens"), keras.metrics.Sum(name="gflops")]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        self.counts[0].update_state(tf.size(x.values))
        self.counts[1].update_state(1e-3)
        return super().compute_loss(x, y, y_pred, sample_weight)


class LocalLosses(keras.callbacks.Callback):
    """Puts a validation loss into the logs that only this rank has measured. Keeps the model of every epoch."""

    def __init__(self, losses):
        super().__init__()
        self.losses, self.states = losses, []

    def on_epoch_end(self, epoch, logs=None):
        logs["val_loss"] = self.losses[epoch]
        self.states.append(state_of(self.model))


def state_of(model):
    ids, rows = model.embedding.export_table("item")
    return [ids.tolist(), rows.tolist(), *(variable.numpy().tolist() for variable in model.trainable_variables)]


@pytest.mark.parametrize("kind", [keras.Model, fr.schedules.PipelinedModel])
def test_every_callback_fits_an_ordinary_model_by_its_defaults(tmp_path, kind):
    embedding = layer_of(fr.TableConfig("item", 2, fr.optimizers.SGD(0.1)))
    symbol = {"item": keras.Input([], dtype=tf.int64, name="item")}
    model = kind(symbol, keras.layers.Dense(1)(embedding(symbol)["item"]))
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.1)), "mse")
    listeners = [
        callbacks.Interrupt(),
        callbacks.Checkpoint(tmp_path / "checkpoint"),
        throughput := callbacks.Throughput(),
        callbacks.Timeline(tmp_path / "timeline"),
        callbacks.EmbeddingMetrics(embedding),
        callbacks.ProgressiveMetrics(["click"]),
        callbacks.TableLearningRate(embedding, lambda epoch, rate: rate),
        callbacks.ReduceLROnPlateau(embedding),
        callbacks.EarlyStopping(),
    ]
    assert {type(one).__name__ for one in listeners} == set(callbacks.__all__)
    data = tf.data.Dataset.from_tensor_slices(({"item": np.arange(12)}, np.ones([12, 1]))).batch(2)
    history = model.fit(data, validation_data=data, epochs=2, verbose=0, callbacks=listeners).history
    assert min(history["batches_per_s"]) > 0 and list(throughput.rates) == ["batches_per_s"]


# From the second epoch on the mean is worse; the largest, the smallest and rank 0's own become better in between.
LOSSES = ([9.0, 8.0, 0.5, 0.4, 0.3], [1.0, 3.0, 20.0, 20.0, 20.0])


def watched(folder):
    """Body: trains under every callback. Returns the final state of the rank."""
    rank, ranks = fr.rank(), fr.size()
    keras.utils.set_random_seed(1)
    model = Counted(fr.optimizers.Adagrad(0.1))
    parts = list(batches(rank, ranks, STEPS))
    for x, _ in parts[:1]:
        model(x, training=False)
    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.05))
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    timeline, local = Timeline(f"{folder}/timeline", first_step=2, steps=2), LocalLosses(LOSSES[rank])
    listeners = [
        callbacks.Throughput(counts=("tokens", "gflops")),
        ModelFlopsUtilization(),
        timeline,
        callbacks.EmbeddingMetrics(model.embedding, timeline, folder=f"{folder}/board/tables"),
        *([keras.callbacks.TensorBoard(f"{folder}/board", write_graph=False)] if rank == 0 else []),
        local,
        saves := callbacks.Checkpoint(f"{folder}/checkpoint", save_best=True, keep=1),
        callbacks.EarlyStopping("val_loss", patience=2, restore_best=True),
    ]
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(parts),
        output_signature=(tf.RaggedTensorSpec([None, None], tf.int64), tf.TensorSpec([None, 1], tf.float32)),
    )
    history = model.fit(dataset, epochs=5, callbacks=listeners, verbose=0).history
    best = [state_of(model)]
    position = saves.load(model)
    best.append(state_of(model))
    kept = saves.load(model, save="best")
    best.append(state_of(model))
    return {
        "history": history, "states": local.states, "best": best, "positions": (position, kept),
        "value": saves.best["value"],
        "overflows": overflows_of_one_rank(rank),
    }  # fmt: skip


def overflows_of_one_rank(rank):
    """Body: returns the rows after an overflow of float16 on rank 1 alone, and after a step with small losses."""
    with policy("mixed_float16"):
        model = Clicks(fr.optimizers.SGD(0.1))
        x, y = next(batches(0, 1, 1))
        model(x, training=False)
        optimizer = overflowing(2.0**8)
        model.compile(optimizer, "mse")
        rows, scales = [], []
        for weight in (1e30 if rank else 1.0, 1.0):
            weights = np.full([len(y)], weight, np.float32)
            model.fit(tf.data.Dataset.from_tensors((x, y, weights)), verbose=0)
            rows.append(model.embedding.export_table("item")[1])
            scales.append(float(keras_api.loss_scale(optimizer)))
        return rows, scales


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    return folder, run_ranks(watched, 2, timeline=True, folder=str(folder))


def test_tensorboard_has_what_tables_and_exchanges_did(ended):
    folder, _ = ended
    written = scalars(folder / "board")
    asked = sent = away = 0
    rows = set()
    for rank in range(2):
        for x, _ in batches(rank, 2, STEPS):
            unique = np.unique(x.values)
            rows |= set(unique.tolist())
            asked, sent = asked + len(x.values), sent + len(unique)
            away += sum(mix64(int(i)) >> 63 != rank for i in unique)
    per_step = [
        {i for rank in range(2) for i in list(batches(rank, 2, STEPS))[s][0].values.numpy()} for s in range(STEPS)
    ]
    lookups = sum(map(len, per_step))
    # One table, so that the totals of the logs are the details beside them.
    of_table = {"rows": len(rows), "growth": len(rows), "evictions": 0, "hit_rate": 1 - len(rows) / lookups}
    first = {
        **{f"epoch_table_{name}": value for name, value in of_table.items()},
        **{f"epoch_{name}/item": value for name, value in of_table.items()}, "epoch_dedup_ratio": asked / sent,
        # An id each way, a header of one count, a row and a gradient of 16 float32.
        "epoch_all_to_all_bytes": (8 * away + 8 * 2 * STEPS + 2 * away * 4 * DIM) / (2 * STEPS),
    }  # fmt: skip
    for tag, value in first.items():
        assert written[tag][0] == pytest.approx(value, rel=1e-6), tag
    for growth, hit_rate in (("growth/item", "hit_rate/item"), ("table_growth", "table_hit_rate")):
        assert written[f"epoch_{growth}"][1] == 0 and written[f"epoch_{hit_rate}"][1] == 1
    assert written["epoch_all_to_all_bytes"][1] == written["epoch_all_to_all_bytes"][0]
    for tag in ("epoch_exposed_ms", "epoch_tokens_per_s", "epoch_mfu"):
        assert all(value > 0 for value in written[tag]) and len(written[tag]) == len(written["epoch_loss"]), tag


def test_all_ranks_stop_after_the_same_epoch(ended):
    _, results = ended
    assert [len(result["states"]) for result in results] == [3, 3]
    alone = []
    for losses in LOSSES:
        stopping = keras.callbacks.EarlyStopping("val_loss", patience=2)
        stopping.set_model(types.SimpleNamespace(stop_training=False))
        stopping.on_train_begin()
        for epoch, loss in enumerate(losses):
            if not stopping.model.stop_training:
                stopping.on_epoch_end(epoch, {"val_loss": loss})
        alone.append(stopping.stopped_epoch)
    assert alone == [0, 2]  # rank 0 alone would have gone on


def test_all_ranks_end_with_the_best_epoch_and_the_checkpoint_keeps_it(ended):
    for result in ended[1]:
        first, _, last = result["states"]
        assert first != last
        assert result["best"] == [first, last, first]
        assert result["positions"] == ((3, 0), (1, 0)) and result["value"] == np.mean([9.0, 1.0])


def test_an_overflow_on_one_rank_is_one_on_all(ended):
    _, results = ended
    for rows, scales in (result["overflows"] for result in results):
        assert scales == [2.0**7, 2.0**7]
        assert np.isfinite(rows[1]).all() and (rows[0] != rows[1]).any()
    untrained = Clicks(fr.optimizers.SGD(0.1)).embedding
    x, _ = next(batches(0, 1, 1))
    untrained({"item": x}, training=True)
    initial = np.concatenate([rows[0] for rows, _ in (result["overflows"] for result in results)])
    np.testing.assert_array_equal(np.sort(initial, axis=None), np.sort(untrained.export_table("item")[1], axis=None))


def epoch_of(watcher, step, epoch=0):
    """Returns the logs of an epoch of one step."""
    logs = {}
    watcher.on_epoch_begin(epoch)
    step()
    watcher.on_train_batch_end(0)
    watcher.on_epoch_end(epoch, logs)
    return logs


def test_evictions_and_what_cannot_be_known():
    config = fr.TableConfig("x", 2, fr.optimizers.SGD(0.1), limits=fr.Limits(eviction="lru", max_rows_per_rank=100))
    embedding = layer_of(config)
    embedding({"x": tf.range(10)}, training=True)

    def step():
        embedding({"x": tf.range(5, 12)}, training=True)
        embedding.internals.groups[0].table.evict("x", 3)

    # One process looks up without an exchange, so nothing travels and duplicates stay.
    assert epoch_of(callbacks.EmbeddingMetrics(embedding), step) == {
        "table_rows": 9, "table_growth": -1, "table_hit_rate": 5 / 7, "table_evictions": 3, "table_left_out": 0
    }  # fmt: skip
    embedding = layer_of(fr.TableConfig("x", 2, keras.optimizers.SGD(0.1)), backend="tfra")
    logs = epoch_of(callbacks.EmbeddingMetrics(embedding), lambda: embedding({"x": tf.range(3)}, training=True))
    assert logs == {"table_rows": 0, "table_growth": 0, "dedup_ratio": 1}


def test_logs_have_totals_and_the_folder_has_each_table_with_its_left_out_rows(tmp_path):
    embedding = layer_of(*(fr.TableConfig(name, 2, fr.optimizers.SGD(0.1)) for name in "xy"))
    inputs = {"x": tf.constant([1, 2, 3, 4]), "y": tf.constant([1])}
    watcher = callbacks.EmbeddingMetrics(embedding, folder=tmp_path)
    for epoch, bad in enumerate(([2, 3, 3], [], [4])):
        weights = tf.constant([[np.nan] if i in bad else [1.0] for i in (1, 2, 3, 4)])

        def step(weights=weights):  # the one row of "y" trains as id 1 does
            train(embedding, inputs, lambda rows: tf.reduce_sum(rows * weights[: len(rows)]))

        assert epoch_of(watcher, step, epoch) == {
            "table_rows": 5, "table_growth": 5 * (epoch == 0), "table_hit_rate": int(epoch > 0), "table_evictions": 0,
            "table_left_out": len(set(bad)),
        }  # fmt: skip
    written = scalars(tmp_path)
    assert len(written) == 2 * 5 and written["epoch_rows/x"] == [4, 4, 4] and written["epoch_rows/y"] == [1, 1, 1]
    assert written["epoch_growth/x"] == [4, 0, 0] and written["epoch_hit_rate/y"] == [0, 1, 1]
    assert written["epoch_left_out/x"] == [2, 0, 1] and written["epoch_left_out/y"] == [0, 0, 0]


def test_early_stopping_refuses_to_restore_half_a_model():
    with pytest.raises(ValueError, match="would restore dense weights, but not the tables.*callbacks.Checkpoint"):
        callbacks.EarlyStopping("val_loss", restore_best_weights=True)


def test_early_stopping_where_nobody_has_measured():
    stopping = callbacks.EarlyStopping("val_loss", patience=0)
    stopping.set_model(types.SimpleNamespace(stop_training=False))
    stopping.on_train_begin()
    for epoch in range(2):  # Keras stops after the first one at no value
        stopping.on_epoch_end(epoch, {"val_loss": float("nan")})
    assert not stopping.model.stop_training


@pytest.mark.parametrize(
    ("optimizer", "rank", "warns", "storage"),
    [
        (fr.optimizers.Adagrad(0.1), 0, True, "float32"),
        (fr.optimizers.Adagrad(0.1), 0, True, "bfloat16"),
        (fr.optimizers.Adagrad(0.1), 1, False, "float32"),  # rank 0 tells for all
        (fr.optimizers.Adagrad(0.1, 1e-6), 0, False, "bfloat16"),
        (fr.optimizers.Ftrl(0.1, initial_accumulator_value=1e-6), 0, False, "float32"),
        (fr.optimizers.RowWiseAdagrad(0.1), 0, False, "float32"),
        (fr.optimizers.RMSprop(0.001), 0, False, "float32"),
    ],
    ids=["default", "bfloat16", "rank 1", "adagrad", "ftrl", "rowwise", "rmsprop"],
)
def test_rows_that_hardly_move_under_a_mean_loss_are_told_once(optimizer, rank, warns, storage, monkeypatch, caplog):
    random = np.random.default_rng(1)
    ids, labels = np.arange(4096), random.integers(0, 2, [4096, 1]).astype(np.float32)
    item = keras.Input([], dtype=tf.int64, name="item")
    table = fr.TableConfig("item", 8, optimizer, storage=fr.Storage(dtype=storage))
    rows = layer_of(table)({"item": item})["item"]
    model = fr.schedules.PipelinedModel({"item": item}, keras.layers.Dense(1)(rows))
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    monkeypatch.setattr("tf_fusedrec.exchange.collectives.rank", lambda: rank)
    for epochs in (2, 1):
        model.fit({"item": ids}, labels, batch_size=4096, epochs=epochs, verbose=0)
    told = [record.getMessage() for record in caplog.records if "hardly train" in record.getMessage()]
    assert len(told) == warns
    assert not told or "table 'item' hardly train: in its first epoch the median row moved by" in told[0]
