"""Trainings as jobs of a run: a queue trains the unfinished ones, validation chooses settings, a bootstrap compares.

A job trains an experiment, evaluates it on held-out splits, and resumes from its last epoch. Its folder gets, after
every epoch, epochs.json and checkpoint/; samples.npz with the exposures or users of the last evaluation of the test
split (models.compare); log.txt; and result.json in place of epochs.json and checkpoint/ when the job has ended.

A resumed job has the random numbers of an uninterrupted one. Data and negatives are functions of (seed, epoch, step),
and dropout starts every epoch from a seed of its own. The weights are bit-equal on at most two ranks. On more ranks the
order of Horovod's sums depends on which tensors it joins, and so on time. `semi_async` is not bit-equal either: the
rows of its first resumed batch are read anew and lack no update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, processes
from tf_fusedrec import callbacks, keras, tf
from tf_fusedrec.data import Column, ParquetFolder, TokenBatches
from tf_fusedrec.data.plan import Cost
from tf_fusedrec.data.rows import concat
from tf_fusedrec.files.manifest import exists
from tf_fusedrec.models.base import TRAINING_PASSES
from tf_fusedrec.models.build import columns, make_embedding, make_model, no_rows
from tf_fusedrec.models.compare import SAMPLES, check_pairs, metrics_of, read_samples
from tf_fusedrec.models.data_sets.interactions import Interactions, write_last_held_out
from tf_fusedrec.models.data_sets.layouts import read_info, read_items
from tf_fusedrec.models.evaluate import Evaluation, evaluator
from tf_fusedrec.models.experiment import Experiment, from_dict
from tf_fusedrec.models.fit_calls import FitCall, fit_calls
from tf_fusedrec.models.parts.dense_inputs import read_statistics

EPOCHS, RESULT, LOG = "epochs.json", "result.json", "log.txt"
RESAMPLES, LEVEL = 1000, 0.95  # of a bootstrap
Entry = dict[str, Any]
Setting = Mapping[str, Any]  # fields of the experiment, such as {"model.dropout": 0.1}
Samples = Mapping[str, np.ndarray]


def best(entries: Iterable[Entry]) -> Entry:
    """Returns the epoch with the best score; the first one of equals."""
    return max((entry for entry in entries if "score" in entry), key=lambda entry: entry["score"])


class Progress(keras.callbacks.Callback):
    """Evaluates epochs, keeps an entry for each, and ends a training whose score stops improving.

    An entry has epoch, loss, seconds, processor_seconds, forward_mflops of a row, the metrics of the evaluated splits
    by their names, `score`, and `moment` if row-wise Adagrad trains the rows. It is written before the checkpoint,
    which has `done` epochs, so the file may be one epoch ahead. That epoch is trained again.

    `splits` has the folders of "validation", "test" or both. The first one gives the score, the mean of the `deciding`
    metrics. `patience` epochs in a row without a better score end the training, and the test split is evaluated at best
    epochs alone; with 0, all epochs are trained. Every `every`-th epoch is evaluated, and the last one.
    """

    def __init__(
        self, place: pathlib.Path, config: Experiment, evaluate: Callable[[pathlib.Path], Evaluation], *,
        splits: Mapping[str, str], deciding: Sequence[str], patience: int, every: int, done: int,
    ):  # fmt: skip
        super().__init__()
        self._place, self._config, self._evaluate = place, config, evaluate
        self._splits, self._deciding, self._patience, self._every = splits, deciding, patience, every
        path = place / EPOCHS
        entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        self.entries: list[Entry] = [entry for entry in entries if entry["epoch"] <= done]

    @property
    def ended(self) -> bool:
        """Whether all epochs are trained, or the last ones did not improve the score."""
        last = self.entries[-1]["epoch"] if self.entries else 0
        waits = self._patience and last and last - best(self.entries)["epoch"] >= self._patience
        return last == self._config.train.epochs or bool(waits)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        layers = [layer for layer in self.model.submodules if isinstance(layer, keras.layers.Dropout)]
        for number, layer in enumerate(layers):
            words = [self._config.seed, epoch, fr.rank(), number]
            seed = int(np.random.SeedSequence(words).generate_state(1)[0])
            layer._random_generator._generator.reset_from_seed(seed)  # Keras has no public way to it
        self._begin = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.model.drain()
        logs = logs or {}
        entry: Entry = {"epoch": epoch + 1, "loss": float(logs["loss"])}
        entry["seconds"] = time.perf_counter() - self._begin[0]
        entry["processor_seconds"] = round(time.process_time() - self._begin[1], 1)
        entry["forward_mflops"] = 1e3 * float(logs["gflops"]) / TRAINING_PASSES / float(logs["samples"])
        if self._config.embedding.optimizer == "rowwise_adagrad":
            entry["moment"] = mean_moment(self.model.embedding)
        self.entries.append(entry)
        if (epoch + 1) % self._every == 0 or epoch + 1 == self._config.train.epochs:
            self._measure(entry)
        if fr.rank() == 0:
            partial = self._place / "partial.json"
            partial.write_text("[\n" + ",\n".join(map(json.dumps, self.entries)) + "\n]\n", encoding="utf-8")
            partial.replace(self._place / EPOCHS)
            print(json.dumps({name: x for name, x in entry.items() if not isinstance(x, dict)}), flush=True)
        self.model.stop_training = self.ended

    def _measure(self, entry: Entry) -> None:
        for split, folder in self._splits.items():
            if split == "test" and self._patience and "score" in entry and best(self.entries) is not entry:
                continue
            entry[split], samples = self._evaluate(pathlib.Path(folder))
            if "score" not in entry:
                entry["score"] = float(np.mean([entry[split][name] for name in self._deciding]))
            if split == "test" and fr.rank() == 0:
                small = {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in samples.items()}
                np.savez_compressed(self._place / "partial.npz", **small)
                (self._place / "partial.npz").replace(self._place / SAMPLES)


def mean_moment(embedding: fr.FusedEmbedding) -> float:
    """Returns the mean second moment of all rows of the layer's tables with RowWiseAdagrad. Collective."""
    moments = [
        group.table.snapshot(name, in_hash_order=False)[1]["accumulator"]
        for group in embedding.internals.groups
        for name in group.table.names
    ]
    here = np.concatenate(moments).astype(np.float64)
    total, rows = fr.collectives.all_gather(np.array([[here.sum(), len(here)]])).sum(axis=0)
    return float(total / rows)


def compiled(
    config: Experiment, data: pathlib.Path, embedding_of: Callable[[Experiment], keras.layers.Layer] = make_embedding
) -> keras.Model:
    """Initializes the process and returns the model with its weights, which are drawn from the experiment's seed."""
    tf.get_logger().setLevel("ERROR")
    fr.init(config.embedding.topology)
    keras.backend.experimental.enable_tf_random_generator()  # dropout's state is a variable, see Progress
    keras.utils.set_random_seed(config.seed + fr.rank())
    model = make_model(config, embedding_of(config), *read_items(data), read_statistics(config.model, data))
    adam = config.train
    optimizer = keras.optimizers.Adam(adam.learning_rate, beta_2=adam.beta_2, epsilon=adam.epsilon)
    model.compile(optimizer=fr.collectives.distributed_optimizer(optimizer))
    model(no_rows(columns(config.model, "train")))  # creates the weights that a checkpoint restores
    return model


def train_job(folder: str, ranks: int, **request: Any) -> int:
    """Trains or resumes a job on new ranks, or here if it has one. Returns its number of epochs."""
    if ranks == 1:
        return on_rank(folder, **request)
    return processes.ask_ranks(on_rank, ranks, timeout_s=24 * 3600, folder=folder, **request)


def on_rank(
    folder: str, experiment: Mapping[str, Any], data: str, users_per_batch: int, **options: Any
) -> int:  # fmt: skip
    """Trains or resumes a job. `options` are the last arguments of Progress. Returns its number of epochs."""
    config, place, source = from_dict(experiment), pathlib.Path(folder), pathlib.Path(data)
    checkpoint = place / "checkpoint"
    model = compiled(config, source)
    done, saved = 0, None
    if exists(checkpoint):
        extra = fr.checkpoint.load(checkpoint, model, model.optimizer)
        done, saved = extra["epoch"], extra["input"]
    progress = Progress(place, config, evaluator(config, model), done=done, **options)
    for call in [] if progress.ended else _calls_of(config, source, users_per_batch, saved):
        saving = callbacks.Checkpoint(checkpoint, call.steps, input_position=call.position)
        fit(model, call, [progress, saving])
    fr.collectives.barrier()  # another rank may still read the checkpoint
    if fr.rank() == 0:
        (place / EPOCHS).replace(place / RESULT)
        shutil.rmtree(checkpoint)
    fr.collectives.barrier()  # horovodrun ends the job when a rank leaves
    return len(progress.entries)


def fit(model: keras.Model, call: FitCall, listeners: Sequence[keras.callbacks.Callback]) -> None:
    model.fit(
        call.dataset, initial_epoch=call.epoch, epochs=call.end, steps_per_epoch=call.steps, callbacks=listeners,
        verbose=0,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Users(Cost):
    """Counts rows, not tokens: a batch has `users` of them."""

    users: int = 0

    def weights(self, tokens: np.ndarray, target_tokens_per_rank: int) -> tuple[np.ndarray, int]:
        return np.ones_like(tokens), self.users


def _calls_of(config: Experiment, data: pathlib.Path, users: int, saved: Mapping[str, Any] | None) -> list[FitCall]:
    """Returns the calls of fit, with batches of `users` rows unless that is 0."""
    if not users:
        return list(fit_calls(config, data, saved))
    folder = ParquetFolder(data / "train", columns(config.model, "train"), rank=0, ranks=1, shuffle_seed=config.seed)
    epochs = config.train.epochs
    batches = TokenBatches(
        folder, length_columns=("item_id",), target_tokens_per_rank=config.train.target_tokens_per_rank,
        cost=_Users(users=users), epochs=epochs, start=saved,
    )  # fmt: skip
    begin = batches.first_epoch
    dataset = batches.dataset(begin, epochs - begin)
    return [FitCall(dataset, begin, epochs, batches.steps_per_epoch, 0, batches.position)]


@functools.cache
def content_of(folder: pathlib.Path) -> str:
    """Returns sixteen hexadecimal digits of a hash over all files of a data set: their paths in it and their bytes.

    Other runs and machines find the folder of a job by it. The folder's own name holds the time of the raw files
    (tf_fusedrec.models.prepare), which a copy of the data does not keep.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:16]


class Job(NamedTuple):
    folder: pathlib.Path
    request: dict[str, Any]  # arguments of train_job, without the folder

    @property
    def finished(self) -> bool:
        return (self.folder / RESULT).exists()

    def epochs(self) -> list[Entry]:
        return json.loads((self.folder / RESULT).read_text(encoding="utf-8"))

    def samples(self) -> dict[str, np.ndarray]:
        return read_samples(self.folder)


def job_of(
    name: str, experiment: Experiment, run: pathlib.Path, data: pathlib.Path, splits: Mapping[str, pathlib.Path], *,
    deciding: Sequence[str], patience: int = 0, every: int | None = None, ranks: int = 1, users_per_batch: int = 0,
) -> Job:  # fmt: skip
    """Returns a job in a folder below `run`. Jobs of other settings or other data have other folders.

    It trains on the part `train` of `data`. `splits` are data sets whose parts `test` are held out. `deciding` and
    `patience`: see Progress; so `every`, but None means 1 with patience, else the last epoch alone. A batch has
    `users_per_batch` rows, or train.target_tokens_per_rank where that is 0.
    """
    request = {
        "experiment": experiment.to_dict(), "deciding": list(deciding), "patience": patience, "ranks": ranks,
        "every": every or (1 if patience else experiment.train.epochs), "users_per_batch": users_per_batch,
    }  # fmt: skip
    contents = {"data": content_of(data), "splits": {split: content_of(folder) for split, folder in splits.items()}}
    facts = json.dumps({**request, **contents}, sort_keys=True)
    folder = run / f"{name}_seed{experiment.seed}_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    return Job(folder, {**request, "data": str(data), "splits": {name: str(path) for name, path in splits.items()}})


def train(jobs: Iterable[Job]) -> None:
    """Trains the unfinished jobs, as many at a time as their ranks have cores. They share the cores evenly."""
    waiting = [job for job in jobs if not job.finished]
    cores, ranks = len(os.sched_getaffinity(0)), max((job.request["ranks"] for job in waiting), default=1)
    workers = max(1, min(len(waiting), cores // ranks))
    threads = str(max(1, cores // (workers * ranks)))
    running: list[tuple[Job, subprocess.Popen[str]]] = []
    with contextlib.ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append((waiting[0], _start(waiting.pop(0), threads, stack)))
            ended = [(job, process) for job, process in running if process.poll() is not None]
            running = [pair for pair in running if pair not in ended]
            for job, process in ended:
                _check(job, process.returncode)
            time.sleep(0.1)


def _start(job: Job, threads: str, stack: contextlib.ExitStack) -> subprocess.Popen[str]:
    print(f"{job.folder.name} ... (its epochs: {LOG} in that folder)", flush=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    log = stack.enter_context((job.folder / LOG).open("w", encoding="utf-8"))
    command = processes.command_of(sys.executable, train_job, {"folder": str(job.folder), **job.request})
    environment = {**processes.environment(), "OMP_NUM_THREADS": threads, "TF_NUM_INTRAOP_THREADS": threads}
    return stack.enter_context(
        processes.started(command, env=environment, cwd=harness.ROOT, stdout=log, stderr=subprocess.STDOUT)
    )


def _check(job: Job, code: int) -> None:
    if code != 0 or not job.finished:
        last = (job.folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-15:]
        raise harness.CheckFailed(f"{job.folder} ended with code {code}:\n" + "\n".join(last))
    scores = [entry["score"] for entry in job.epochs() if "score" in entry]
    print(f"{job.folder.name}: " + " ".join(f"{value:.4f}" for value in scores), flush=True)


def choice(tried: Sequence[tuple[Setting, Sequence[Job]]]) -> dict[str, Any]:
    """Returns setting, epochs and score of the best job on its validation split, that split's metrics, and all scores.

    Scores and metrics are means over seeds. An epoch counts if all seeds have trained it.
    """
    means = [
        (setting, [_mean(of_seeds) for of_seeds in zip(*(job.epochs() for job in jobs))]) for setting, jobs in tried
    ]
    setting, epochs = max(means, key=lambda one: best(one[1])["score"])
    chosen = best(epochs)
    return {
        "setting": setting, "epochs": chosen["epoch"], "score": chosen["score"], "validation": chosen["validation"],
        "tried": [{**one, "scores": [round(entry["score"], 4) for entry in of]} for one, of in means],
    }  # fmt: skip


def _mean(entries: Sequence[Entry]) -> Entry:
    """Returns epoch, mean score and mean metrics of one epoch that several seeds have trained."""
    return {
        "epoch": entries[0]["epoch"],
        "score": float(np.mean([entry["score"] for entry in entries])),
        "validation": means([entry["validation"] for entry in entries]),
    }


def means(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([one[name] for one in results])) for name in results[0]}


def differences(
    baseline: Sequence[Samples], model: Sequence[Samples], names: Sequence[str], resamples: int = RESAMPLES
) -> dict[str, dict[str, float]]:
    """Returns model minus baseline: {metric: difference, low, high}, of the means over the seeds of each.

    A draw takes users with replacement, the same for all seeds and in every call, because exposures of one user are not
    independent. The interval has the percentiles of LEVEL.
    """
    for one in (*baseline, *model):
        check_pairs(baseline[0], one)
    measured = [[metrics_of(one) for one in of_seeds] for of_seeds in (baseline, model)]
    users = len(np.unique(baseline[0]["user"]))

    def between(times: np.ndarray) -> np.ndarray:
        first, second = (
            np.mean([[metrics[name](times) for name in names] for metrics in of_seeds], axis=0)
            for of_seeds in measured
        )  # fmt: skip
        return second - first

    generator = np.random.default_rng(0)
    draws = [between(np.bincount(generator.integers(0, users, users), minlength=users)) for _ in range(resamples)]
    low, high = np.nanquantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    rows = zip(names, between(np.ones(users, np.int64)), low, high)
    return {name: {"difference": float(x), "low": float(a), "high": float(b)} for name, x, a, b in rows}


def cut(folder: pathlib.Path, output: pathlib.Path, *, users: int | None = None, part: str = "test") -> pathlib.Path:
    """Returns a retrieval data set of the first users of `folder`, with the same catalogue. Makes it unless it exists.

    With the part "validation", it lacks the last item of every user, and its test part holds the validation items.
    """
    if output.exists():
        return output
    names = ("item_id", "timestamp")
    read = [
        Column("user_id"), *(Column(name, ragged=True) for name in names), Column("target_item"),
        Column("target_timestamp"),
    ]  # fmt: skip
    rows = concat(list(ParquetFolder(folder / "test", read).read()))
    rows = rows.slice(0, min(users or rows.num_rows, rows.num_rows))
    items, times = (rows.ragged(name) for name in names)
    user = np.asarray(rows.columns["user_id"])
    every = [np.repeat(user, items.lengths()), items.values, times.values]
    targets = user, *(np.asarray(rows.columns[f"target_{name}"]) for name in ("item", "timestamp"))
    every = [np.insert(values, items.row_splits[1:], target) for values, target in zip(every, targets)]
    output.parent.mkdir(parents=True, exist_ok=True)
    source = f"{read_info(folder).source}, cut"
    write_last_held_out(
        output, Interactions(*every), path=folder, source=source, catalogue=read_items(folder)[0], held_out=part
    )
    return output


def held_out(whole: pathlib.Path, root: pathlib.Path, users: int | None = None) -> dict[str, pathlib.Path]:
    """Returns the data sets below `root` with the splits "validation" and "test", of the first users unless None."""
    if users is not None:
        whole = cut(whole, root / f"{whole.name}_users{users}", users=users)
    return {"validation": cut(whole, root / f"{whole.name}_validation", part="validation"), "test": whole}
