"""Keras callbacks of the main job: evaluation of every epoch, the record and the screen, TensorBoard, trackers."""

from __future__ import annotations

import importlib.util
import math
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tensorboard.plugins.hparams import api as hparams

import tf_fusedrec as fr
from tf_fusedrec import callbacks, keras, tf
from tf_fusedrec.models import screen
from tf_fusedrec.models.compare import flat
from tf_fusedrec.models.evaluate import Evaluation
from tf_fusedrec.models.run_folder import RunRecord

# Counts that are equal in every epoch, and sizes of a held-out split: no curves.
CONSTANT = ("events", "samples", "tokens", "gflops", "val_exposures", "val_users")
_MOST_STEPS = 512  # of the record's curve of the loss; a full curve keeps every other step
_REDRAW_S = 0.2


class HeldOut(keras.callbacks.Callback):
    """Puts the metrics of a held-out split into the logs of every whole epoch, as val_<name>. Collective.

    It also gives the AUC of training, which ProgressiveMetrics has measured, the name of the split's.

    Args:
      evaluation: Function without arguments that evaluates the model; None: there is no such split.
      interrupt: Callback that ends training; an interrupted epoch is not evaluated.
    """

    def __init__(self, evaluation: Callable[[], Evaluation] | None, interrupt: callbacks.Interrupt):
        super().__init__()
        self._evaluation, self._interrupt = evaluation, interrupt

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None:
            return
        for name in [name for name in logs if name.startswith("progressive_") and name.endswith("_epoch")]:
            logs[name.removeprefix("progressive_").removesuffix("_epoch")] = logs.pop(name)
        if self._evaluation is not None and self._interrupt.signal_name is None:
            self.model.drain()
            self.model.embedding.synchronize()
            results = self._evaluation().results
            logs.update({f"val_{name}": value for name, value in results.items() if not name.startswith("baseline_")})


class Progress(keras.callbacks.Callback):
    """Writes every epoch into the record of a run, and shows it: a line, and a live bar on a terminal.

    Put it after all callbacks that add to the logs. Rank 0 prints.

    Args:
      record: Record of the run.
      saving: Function that returns the Checkpoint callback of the present fit.
    """

    def __init__(self, record: RunRecord, saving: Callable[[], callbacks.Checkpoint]):
        super().__init__()
        self._record, self._saving = record, saving
        self._width = terminal_width()
        self._every, self._shown_heading, self._warned = 1, False, False
        self._begin = self._drawn = 0.0
        self._epoch, self._trained = 0, 0
        self._seconds: list[float] = []  # of whole epochs
        self._before = (0, 0.0)  # step and sum of its losses at the last point of the curve

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if not self._shown_heading and fr.rank() == 0:
            print("\n" + screen.epochs_heading(self._record.fields, line_width(self._width)), flush=True)
        self._shown_heading = True

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch, self._begin, self._before = epoch, time.perf_counter(), (0, 0.0)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._trained += 1
        if fr.rank() or not logs:
            return
        step, now = batch + 1, time.perf_counter()
        if self._trained % self._every == 0:
            self._add_step(step, float(logs["loss"]))
        if self._width and now - self._drawn > _REDRAW_S:
            self._drawn = now
            self._draw(step, now - self._begin, logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        fields, best = self._record.fields, self._saving().best
        self._seconds.append(time.perf_counter() - self._begin)
        values = {name: float(value) for name, value in (logs or {}).items()}
        epochs = fields["epochs_wanted"] or epoch + 1
        entry = {
            **{name: None if math.isnan(value) else value for name, value in values.items()},
            "epoch": epoch + 1,
            "seconds": self._seconds[-1],
            "left": (epochs - epoch - 1) * sum(self._seconds) / len(self._seconds),
            "saved": True,
            "is_best": best is not None and best["epoch"] == epoch,
        }
        # A resumed job trains the rest of an epoch again under its number.
        self._record.update(epochs=[*(one for one in fields["epochs"] if one["epoch"] <= epoch), entry])
        if fr.rank() == 0:
            width = line_width(self._width)
            self._print(screen.epoch_line(self._record.fields, entry, width))
            hint = None if self._warned else screen.rising(self._record.fields)
            if hint is not None:
                self._warned = True
                self._print(screen.warning(hint, width))

    def _add_step(self, step: int, mean: float) -> None:
        """Adds the mean loss since the last point of the curve, from the mean since the epoch began."""
        (before, total), now = self._before, (step, step * mean)
        if step > before:
            steps = self._record.fields["steps"]
            steps["step"].append(int(self.model.step))
            steps["loss"].append(round((now[1] - total) / (step - before), 6))
            if len(steps["step"]) >= _MOST_STEPS:
                self._every *= 2
                steps |= {name: values[1::2] for name, values in steps.items()}
        self._before = now

    def _draw(self, step: int, seconds: float, logs: Mapping[str, Any]) -> None:
        steps = (self.params or {}).get("steps") or step
        remaining_s = (steps - step) * seconds / step
        if self._seconds:
            epochs = self._record.fields["epochs_wanted"] or self._epoch + 1
            remaining_s += (epochs - self._epoch - 1) * self._seconds[-1]
        progress = {
            "epoch": self._epoch + 1, "loss": float(logs["loss"]), "step": step, "steps": steps, "left": remaining_s,
            "events_per_s": fr.size() * float(logs["events"]) / seconds,
        }  # fmt: skip
        width = terminal_width() or 80
        sys.stdout.write("\r" + screen.bar_line(self._record.fields, progress, width) + "\x1b[K")
        sys.stdout.flush()

    def _print(self, text: str) -> None:
        print(("\r\x1b[K" if self._width else "") + text, flush=True)


def terminal_width() -> int:
    """Returns the columns of the terminal that shows the output of this process, 0 if it goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def line_width(terminal: int) -> int:
    """Returns the columns of lines: those of the terminal, from 80 to 100."""
    return min(max(terminal or 100, 80), 100)


class Board(keras.callbacks.TensorBoard):
    """Keras' TensorBoard with the settings as HPARAMS, and without counts, which are equal in all epochs.

    Args:
      folder: Folder of the files. Curves by step have a point for every 50th step.
      settings: Settings of the run, nested.
    """

    def __init__(self, folder: pathlib.Path, settings: Mapping[str, Any]):
        super().__init__(str(folder), write_graph=False, update_freq=50)
        writer = tf.summary.create_file_writer(str(folder))
        with writer.as_default(step=0):
            hparams.hparams({name: _plain(value) for name, value in flat(settings)}, trial_id=folder.parent.name)
        writer.close()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        super().on_train_batch_end(batch, _curves(logs))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        with tf.summary.record_if(True):  # Keras 3 writes epochs under the condition of steps
            super().on_epoch_end(epoch, _curves(logs))


def _plain(value: Any) -> bool | int | float | str:
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _curves(logs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (logs or {}).items() if name not in CONSTANT}


def tracker(package: str, record: RunRecord) -> keras.callbacks.Callback:
    """Returns the Keras callback of MLflow or Weights & Biases for rank 0, with the settings of the run.

    Raises:
      ValueError: The package is not installed.
    """
    check_tracker(package)
    experiment = record.fields["experiment"]
    if package == "mlflow":
        import mlflow

        mlflow.set_experiment(experiment["name"])
        mlflow.start_run(run_name=record.folder.name)
        mlflow.log_dict(record.fields, "run.json")

        class Named(mlflow.keras.MlflowCallback):
            """MLflow drops all metrics of an epoch that has a name with "@", such as hr@10."""

            def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
                super().on_epoch_end(epoch, {name.replace("@", "_at_"): value for name, value in (logs or {}).items()})

        return Named()
    import wandb
    from wandb.integration.keras import WandbMetricsLogger

    wandb.init(project=experiment["name"], name=record.folder.name, config=experiment)
    return WandbMetricsLogger()


def check_tracker(package: str) -> None:
    """Raises ValueError unless the package of train.tracker is installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"train.tracker is {package!r}, which is not installed. Use `pip install {package}`.")
