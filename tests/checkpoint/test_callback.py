"""The Checkpoint callback in one process: the times of its saves, the saved positions, and restored state."""

import numpy as np
import pytest

from tests.checkpoint.tables import DictTable, contents, embedding_of
from tf_fusedrec import callbacks, checkpoint, keras, tf
from tf_fusedrec.files.saves import read_manifest


def model(steps_per_execution=1):
    dense = keras.Sequential([keras.layers.Dense(1, input_shape=(2,), kernel_initializer="ones")])
    dense.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=steps_per_execution)
    return dense


def table():
    filled = DictTable("item")
    filled.train("item", [1, 2, 3], np.random.default_rng(0))
    return filled


def fit(dense, listeners, epochs, steps, initial_epoch=0):
    data = tf.data.Dataset.from_tensors((tf.ones([1, 2]), tf.ones([1, 1]))).repeat()
    dense.fit(
        data, epochs=epochs, steps_per_epoch=steps, initial_epoch=initial_epoch, callbacks=listeners, verbose=0
    )  # fmt: skip


@pytest.fixture
def positions(monkeypatch):
    """Returns (epoch, step) of every save."""
    seen = []
    save = checkpoint.Checkpointer.save

    def noted(self, extra, **options):
        seen.append((extra["epoch"], extra["step"]))
        return save(self, extra, **options)

    monkeypatch.setattr(checkpoint.Checkpointer, "save", noted)
    return seen


class StopAfter(keras.callbacks.Callback):
    """Ends training after a step, as Interrupt does."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        self.model.stop_training = self.left == 0


def test_every_epoch_is_saved_and_on_the_disk_when_training_ends(tmp_path, positions):
    saves = callbacks.Checkpoint(
        tmp_path / "c", 5, {"name": "a"}, input_position=lambda *at: ["row", *at], layers=[embedding_of(table())]
    )
    fit(model(), [saves], 3, 5)
    assert positions == [(1, 0), (2, 0), (3, 0)]
    extra = read_manifest(tmp_path / "c")["extra"]
    assert extra == {"name": "a", "epoch": 3, "step": 0, "input": ["row", 3, 0]}


@pytest.mark.parametrize(
    ("together", "options", "stop", "epochs", "want"),
    [
        (1, {"every_steps": 2}, 99, 2, [(0, 2), (0, 4), (1, 0), (1, 2), (1, 4), (2, 0)]),
        (1, {"every_steps": 5}, 99, 2, [(1, 0), (2, 0)]),
        (2, {"every_steps": 3}, 99, 1, [(0, 4), (1, 0)]),  # after 2, 4 and 5 steps
        (1, {}, 8, 9, [(1, 0), (1, 3)]),
        # A stopped epoch has no evaluation.
        (1, {"save_best": True, "monitor": "auc"}, 2, 9, [(0, 2)]),
    ],
)
def test_it_saves_inside_epochs_when_asked_or_stopped(together, options, stop, epochs, want, tmp_path, positions):
    saves = callbacks.Checkpoint(tmp_path / "c", 5, {}, layers=[embedding_of(table())], **options)
    fit(model(together), [StopAfter(stop), saves], epochs, 5)
    assert positions == want and saves.best is None


def test_a_job_goes_on_where_it_was_stopped(tmp_path, positions, caplog):
    first = model()
    fit(first, [StopAfter(8), callbacks.Checkpoint(tmp_path / "c", 5, {}, layers=[embedding_of(table())])], 9, 5)
    assert "will replace" not in caplog.text
    second, loaded = model(), DictTable("item")
    saves = callbacks.Checkpoint(tmp_path / "c", 5, {}, every_steps=4, layers=[embedding_of(loaded)])
    assert callbacks.Checkpoint(tmp_path / "new", layers=[embedding_of(loaded)]).load(second) == (0, 0)
    assert saves.load(second) == (1, 3)
    assert loaded.size("item") == 3
    for got, want in zip(second.get_weights(), first.get_weights()):
        np.testing.assert_array_equal(got, want)
    positions.clear()
    fit(second, [saves], 2, 2, initial_epoch=1)  # the rest of epoch 1
    fit(second, [saves], 4, 5, initial_epoch=2)
    assert positions == [(2, 0), (2, 4), (3, 0), (3, 4), (4, 0)]
    assert int(second.optimizer.iterations) == 20 and "will replace" not in caplog.text
    fit(model(), [callbacks.Checkpoint(tmp_path / "c", 5, {}, layers=[embedding_of(loaded)])], 1, 5)
    assert "which this training will replace. Use Checkpoint.load(model) before fit" in caplog.text


def test_a_failure_in_the_background_ends_training(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tf_fusedrec.files.disk.write", full)
    with pytest.raises(OSError, match="No space left"):
        fit(model(), [callbacks.Checkpoint(tmp_path / "c", 5, {}, layers=[embedding_of(table())])], 1, 5)


@pytest.mark.parametrize("known", [True, False])
def test_without_the_number_of_steps_keras_tells_whether_an_epoch_is_whole(known, tmp_path, positions):
    saves = callbacks.Checkpoint(tmp_path / "c", every_steps=2, layers=[embedding_of(table())])
    data = tf.data.Dataset.from_tensors((tf.ones([1, 2]), tf.ones([1, 1]))).repeat(3)
    data = data if known else data.filter(lambda x, y: True)
    model().fit(data, epochs=9, callbacks=[saves, StopAfter(5)], verbose=0)
    assert positions == [(0, 2), (1, 0), (1, 2), (1, 2)]
    first = model()
    assert saves.load(first) == (1, 2)
    first.fit(data.take(1), initial_epoch=1, epochs=2, callbacks=[saves], verbose=0)  # the rest of the epoch
    assert positions[4:] == [(2, 0)]


class Scores(keras.callbacks.Callback):
    """Logs a score of every epoch and trains a table. Keeps the states of the model."""

    def __init__(self, trained, scores):
        super().__init__()
        self.table, self.scores, self.states = trained, scores, []

    def on_epoch_end(self, epoch, logs=None):
        self.table.train("item", [1, 2, 3 + epoch], np.random.default_rng(epoch))
        logs["score"] = self.scores[epoch]
        self.states.append(self.state())

    def state(self):
        return contents([self.table]), [weight.tolist() for weight in self.model.get_weights()]


@pytest.mark.parametrize(("full_every", "mode"), [(1, "max"), (3, "min")])
def test_the_best_epoch_stays_beside_the_last_ones_and_ends_training(full_every, mode, tmp_path):
    trained, sign = table(), 1 if mode == "max" else -1
    scores = Scores(trained, [sign * score for score in (0.1, 0.9, np.nan, 0.3, 0.9, 0.5, 0.8, 0.95, 0.2)])
    options = {
        "save_best": True, "restore_best": True, "monitor": "score", "mode": mode, "keep": 1, "full_every": full_every,
        "layers": [embedding_of(trained)],
    }  # fmt: skip
    saves, first = callbacks.Checkpoint(tmp_path / "c", **options), model()
    fit(first, [scores, saves], 6, 2)
    assert scores.state() == scores.states[1] != scores.states[5]
    extra = read_manifest(tmp_path / "c")["extra"]
    assert extra == {"epoch": 6, "step": 0, "best": {"monitor": "score", "value": sign * 0.9, "epoch": 1}}
    assert len(checkpoint.saves(tmp_path / "c")) <= 2 + 2 * (full_every > 1)  # and the full saves of two deltas
    again = callbacks.Checkpoint(tmp_path / "c", **options)
    assert again.load(first) == (6, 0) and again.best == extra["best"] and scores.state() == scores.states[5]
    fit(first, [scores, again], 7, 2, initial_epoch=6)
    assert again.best == extra["best"] and scores.state() == scores.states[1]
    fit(first, [scores, again], 9, 2, initial_epoch=7)
    assert again.best == {**extra["best"], "value": sign * 0.95, "epoch": 7} and scores.state() == scores.states[7]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"monitor": "score", "save_best": True}, "mode 'auto' does not know the metric 'score'. Use mode='min' or"),
        ({"every_steps": -1}, "every_steps must be >= 0, got -1"),
        ({"mode": "best"}, "mode must be 'auto', 'min' or 'max', got 'best'"),
        ({"restore_best": True}, "restore_best=True needs save_best=True"),
        ({"monitor": "auc", "save_best": True}, r"monitor 'auc' is not among the logs \['loss'\] of epoch 1"),
    ],
)
def test_options_and_best_epochs_that_cannot_be_are_refused(options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        fit(model(), [callbacks.Checkpoint(tmp_path / "c", layers=[embedding_of(table())], **options)], 1, 1)
