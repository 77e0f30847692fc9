"""Training on a growing folder, on one and two ranks: every row once, with AUC and NE before its training."""

import logging
import pathlib
import threading
import time

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.data.shards import COLUMNS, write_folder
from tests.oracles.metrics import auc_oracle
from tests.support.ranks import run_ranks
from tf_fusedrec import collectives, keras, tf
from tf_fusedrec.callbacks.progressive import ProgressiveMetrics
from tf_fusedrec.data import GrowingFolder, ParquetFolder, TokenBatches
from tf_fusedrec.data.growing import check_same_files

PARTITIONS, ROWS = 3, 14


class Clicks(keras.Model):
    """A model with one weight per rating place. It records its scores before each update."""

    def __init__(self, progressive):
        super().__init__()
        self.progressive, self.scored = progressive, []
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, batch):
        return self.dense(tf.cast(batch["user_id"] % 5, tf.float32)[:, tf.newaxis])[:, 0]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        labels = tf.cast(x["user_id"] % 3 == 0, tf.float32)
        self.progressive.update({"click": labels}, {"click": y_pred})
        if not self.progressive._testing:
            self.scored.append((labels.numpy(), y_pred.numpy()))
        losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=y_pred)
        return tf.reduce_sum(losses) / 10


def add(path, number):
    folder = write_folder(path / f".{number}", [ROWS], 4)
    (folder / "_SUCCESS").touch()
    folder.rename(path / f"hour={number}")


def trained(path, directory, every, grows):
    """Trains all partitions. With `grows`, all but the first arrive while fit runs."""
    progressive = ProgressiveMetrics(["click"], every_steps=every, folder=directory, first_step=100)
    model, told, users = Clicks(progressive), [], []
    model.compile(collectives.distributed_optimizer(keras.optimizers.SGD(0.5)), run_eagerly=True)
    end_window = progressive._end_window
    progressive._end_window = lambda: (end_window(), told.append(dict(progressive.latest)))
    begun = threading.Event()

    def write():
        begun.wait()
        for number in range(1, PARTITIONS):
            add(path, number)
            time.sleep(0.05)

    writer = threading.Thread(target=write)
    if grows and fr.rank() == 0:
        writer.start()
    rank, size = fr.rank(), fr.size()
    logs = []
    for partition in GrowingFolder(path, poll_s=0.02, max_partitions=PARTITIONS):
        folder = ParquetFolder(partition.path, COLUMNS, rank=rank, ranks=size, shuffle_seed=1)
        check_same_files(folder)
        batches = TokenBatches(folder, length_columns=["item_id"], target_tokens_per_rank=4)
        if not model.built:
            model(next(iter(batches.dataset())))
        history = model.fit(
            batches.dataset(), initial_epoch=partition.number, epochs=partition.number + 1, verbose=0,
            steps_per_epoch=batches.steps_per_epoch, validation_data=batches.dataset() if grows else None,
            callbacks=[progressive, keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: begun.set())],
        )  # fmt: skip
        logs.append({name: values[-1] for name, values in history.history.items()})
        users.append(folder.num_rows)
    if writer.ident:
        writer.join()
    return list(model.scored), told, logs, [weight.tolist() for weight in model.get_weights()], users


def on_ranks(path, directory, every):
    """Body: trains on the growing folder, then on the complete one."""
    path = pathlib.Path(path)
    growing = trained(path, directory, every, True)
    collectives.barrier()
    return growing, trained(path, None, every, False)


def oracle(scored, steps):
    """Returns AUC and NE of the given steps of all ranks, computed by NumPy."""
    labels, logits = (np.concatenate([of[step][part] for of in scored for step in steps]) for part in (0, 1))
    chance = 1 / (1 + np.exp(-logits.astype(np.float64)))
    entropy = -np.mean(np.where(labels == 1, np.log(chance), np.log1p(-chance)))
    rate = labels.mean(dtype=np.float64)
    own = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)) if 0 < rate < 1 else np.nan
    bins = np.floor(logits.astype(np.float64) * 512)  # the documented bins of AUC; equal bins are ties
    return auc_oracle(labels, bins), entropy / own


@pytest.mark.parametrize(("ranks", "every"), [(1, 4), (2, 2)])
def test_partitions_that_arrive_during_fit_train_like_earlier_ones(tmp_path, ranks, every, caplog):
    (tmp_path / "d").mkdir()
    add(tmp_path / "d", 0)
    given = {"path": str(tmp_path / "d"), "directory": str(tmp_path / "events"), "every": every}
    if ranks == 1:
        with caplog.at_level(logging.INFO, "tf_fusedrec.callbacks.progressive"):
            results = [on_ranks(**given)]
    else:
        results = run_ranks(on_ranks, ranks, **given)
    for growing, complete in results:
        assert growing[3:] == complete[3:] == (results[0][0][3], [ROWS] * PARTITIONS)
        assert len(growing[0]) == len(results[0][0][0])  # all ranks make the same number of steps
        for (labels, logits), (again, other) in zip(growing[0], complete[0]):
            assert labels.tolist() == again.tolist() and logits.tolist() == other.tolist()
    scored, told = [growing[0] for growing, _ in results], results[0][0][1]
    assert sum(len(labels) for of in scored for labels, _ in of) == ROWS * PARTITIONS

    # A window has `every` steps, or the rest of a partition.
    steps = len(scored[0]) // PARTITIONS
    windows = [
        range(number * steps + begin, min(number * steps + begin + every, (number + 1) * steps))
        for number in range(PARTITIONS) for begin in range(0, steps, every)
    ]  # fmt: skip
    assert len(told) == len(windows) and steps % every  # both kinds of end
    for window, values in zip(windows, told):
        for kind, of in (("window", window), ("cumulative", range(window[-1] + 1))):
            auc, ne = oracle(scored, of)
            # Bins of 1/512 separate all distinct float32 logits here.
            assert values[f"progressive/click_auc_{kind}"] == pytest.approx(auc, abs=1e-12, nan_ok=True)
            assert values[f"progressive/click_ne_{kind}"] == pytest.approx(ne, rel=1e-6, nan_ok=True)
    for growing, _ in results:
        assert str(growing[1]) == str(told)  # nan too
        assert growing[2][-1]["progressive_click_auc_cumulative"] == told[-1]["progressive/click_auc_cumulative"]
    check_events(tmp_path / "events", [100 + window[-1] + 1 for window in windows], told)
    if ranks == 1:
        assert f"step {100 + every}: progressive/click_auc_window " in caplog.text


def check_events(directory, steps, told):
    found = {}
    (file,) = directory.glob("events.*")  # one rank writes
    for event in tf.compat.v1.train.summary_iterator(str(file)):
        for value in event.summary.value:
            found[value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    expected = {(name, step): value for step, values in zip(steps, told) for name, value in values.items()}
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6, nan_ok=True)  # float32


def test_refusals():
    for wrong, message in [
        ({"tasks": []}, "tasks must name at least one"),
        ({"every_steps": 0}, "every_steps must be >= 1, got 0"),
        ({"kinds": ["window", "day"]}, "kinds must be some of .*got .'window', 'day'"),
    ]:
        with pytest.raises(ValueError, match=message):
            ProgressiveMetrics(**{"tasks": ["click"], **wrong})
