"""One job on its ranks: trains an experiment until validation stops improving. It resumes from its last epoch.

Its folder gets, after every epoch, curve.json and checkpoint/, and after every best epoch samples.npz with the test
split's users (models.compare). result.json appears when the job has ended.

A resumed job has the random numbers of an uninterrupted one. Data and negatives are functions of (seed, epoch, step),
and dropout starts every epoch from a seed of its own. The weights are bit-equal on at most two ranks. On more ranks the
order of Horovod's sums depends on which tensors it joins, and so on time. `semi_async` is not bit-equal either: the
rows of its first resumed batch are read anew and lack no update.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness
from benchmarks.harness.training import Curve, replace
from models.build import columns, make_embedding, make_model, no_rows
from models.evaluate import Evaluation, evaluator
from models.experiment import Experiment, from_dict
from models.fit_calls import fit_calls
from tf_fusedrec import callbacks, keras
from tf_fusedrec.data import read_items

METRICS = ("hr@10", "ndcg@10", "ne")
DECIDING = "ndcg@10"  # of the validation split; larger is better
Entry = dict[str, Any]


def best(entries: Sequence[Entry]) -> Entry:
    """Returns the epoch with the best validation; the first one of equals."""
    return max(entries, key=lambda entry: entry["validation"][DECIDING])


def ended(entries: Sequence[Entry], patience: int, epochs: int) -> bool:
    """Returns whether `patience` epochs in a row did not improve validation, or all epochs are trained."""
    return bool(entries) and (len(entries) == epochs or entries[-1]["epoch"] - best(entries)["epoch"] >= patience)


class Progress(Curve):
    """Evaluates every epoch, keeps the curve, and stops training."""

    def __init__(
        self, folder: pathlib.Path, experiment: Experiment, evaluate: Callable[[pathlib.Path], Evaluation],
        splits: Mapping[str, str], patience: int, done: int,
    ):  # fmt: skip
        super().__init__(folder / "curve.json", done)
        self._folder, self._experiment, self._patience = folder, experiment, patience
        self._evaluate, self._splits = evaluate, splits

    @property
    def ended(self) -> bool:
        return ended(self.entries, self._patience, self._experiment.train.epochs)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        layers = [layer for layer in self.model.submodules if isinstance(layer, keras.layers.Dropout)]
        for number, layer in enumerate(layers):
            words = [self._experiment.seed, epoch, fr.collectives.rank(), number]
            seed = int(np.random.SeedSequence(words).generate_state(1)[0])
            layer._random_generator._generator.reset_from_seed(seed)  # Keras has no public way to it

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.model.drain()
        super().on_epoch_end(epoch, logs)
        self.model.stop_training = self.ended

    def measure(self, entry: Entry, logs: Mapping[str, Any]) -> None:
        entry["validation"] = self._metrics("validation")
        entry["moment"] = mean_moment(self.model.embedding)
        if best(self.entries) is entry:
            entry["test"] = self._metrics("test")

    def _metrics(self, split: str) -> dict[str, float]:
        """Evaluates a split. Rank 0 writes the samples of the test split."""
        results, samples = self._evaluate(pathlib.Path(self._splits[split]))
        if split == "test" and fr.collectives.rank() == 0:
            partial = self._folder / "partial.npz"
            small = {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in samples.items()}
            np.savez_compressed(partial, **small)
            partial.replace(self._folder / "samples.npz")
        return {name: results[name] for name in METRICS}


def mean_moment(embedding: fr.FusedEmbedding) -> float:
    """Returns the mean second moment of all rows of the layer's tables with RowWiseAdagrad. Collective."""
    found = [
        lookup.table.snapshot(name, in_hash_order=False)[1]["accumulator"]  # type: ignore[attr-defined]
        for lookup in embedding.lookups
        for name in lookup.table.names
    ]
    here = np.concatenate(found).astype(np.float64)
    total, rows = fr.collectives.all_gather(np.array([[here.sum(), len(here)]])).sum(axis=0)
    return float(total / rows)


def on_rank(folder: str, experiment: Mapping[str, Any], splits: Mapping[str, str], patience: int) -> Entry | None:
    """Trains or resumes the job. Returns the best epoch on rank 0, None on others."""
    config, place = from_dict(experiment), pathlib.Path(folder)
    fr.init(config.embedding.topology)
    keras.backend.experimental.enable_tf_random_generator()  # dropout's state is a variable, see Progress
    keras.utils.set_random_seed(config.seed + fr.collectives.rank())
    data, checkpoint = pathlib.Path(splits["validation"]), place / "checkpoint"
    model = make_model(config, make_embedding(config), *read_items(data))
    adam = keras.optimizers.legacy.Adam(
        config.train.learning_rate, beta_2=config.train.beta_2, epsilon=config.train.epsilon
    )
    model.compile(optimizer=fr.collectives.distributed_optimizer(adam))
    model(no_rows(columns(config.model, "train")))  # creates the weights that a checkpoint restores
    done, saved = 0, None
    if fr.checkpoint.exists(checkpoint):
        extra = fr.checkpoint.load(checkpoint, model, model.optimizer)
        done, saved = extra["epoch"], extra["input"]
    progress = Progress(place, config, evaluator(config, model), splits, patience, done)
    for call in [] if progress.ended else fit_calls(config, data, saved):
        saving = callbacks.Checkpoint(
            checkpoint, call.steps, {"experiment": config.to_dict()}, input_position=call.position
        )  # fmt: skip
        model.fit(
            call.dataset, initial_epoch=call.epoch, epochs=call.end, steps_per_epoch=call.steps,
            callbacks=[progress, saving], verbose=0,
        )  # fmt: skip
    result = None
    if fr.collectives.rank() == 0:
        result = {**best(progress.entries), "trained_epochs": len(progress.entries), **harness.environment()}
        replace(place / "result.json", json.dumps(result, indent=1) + "\n")
    fr.collectives.barrier()  # horovodrun ends the job when a rank leaves
    return result
