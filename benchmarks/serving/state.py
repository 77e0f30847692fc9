"""Times one request of one user: the whole history against a kept state (models/user_state.py), both in one process."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness
from models.base import Batch
from models.build import columns, make_embedding, make_model, no_rows
from models.experiment import load
from models.experiment.ranking_config import RankingConfig
from models.grm import GRM
from models.user_state import GRMStates
from tf_fusedrec import tf
from tf_fusedrec.layers import jagged

IDS = 1000  # rows of a table
DAY = 86_400
Server = Callable[..., dict[str, tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Request:
    """Events that the state holds, events since then, candidates, and timed rounds."""

    events: int = 4096
    new: int = 128
    candidates: int = 256
    rounds: int = 30


def long_model(config: str, size: Request) -> tuple[GRM, Batch, Batch, Batch]:
    """Returns a GRM for long histories, a whole request, and its parts: the events of the state, and those since."""
    lengths = [f"model.max_history={size.events + size.new}", f"model.max_exposures={size.candidates}"]
    experiment = load(config, [*lengths, "model.causal_context=true"])
    model = make_model(experiment, make_embedding(experiment), np.arange(1), np.ones(1, np.int64))
    assert isinstance(model, GRM)
    model(no_rows(columns(experiment.model, "train")))
    random = np.random.default_rng(0)
    for table in experiment.tables:
        fill(model, table.name, np.arange(IDS), random)
    whole = batch_of(model.config, np.array([size.events + size.new]), size.candidates, IDS, random)
    history = [name for name in whole if name.startswith("history_")]
    cut = {name: jagged.split(whole[name], [[size.events], [size.new]]) for name in history}
    seen, since = ({**whole, **{name: cut[name][part] for name in history}} for part in range(2))
    nothing = {name: jagged.last(whole[name], 0) for name in whole if name.startswith("exposed_")}
    return model, whole, {**seen, **nothing}, since


def state_fields(config: str, size: Request) -> dict[str, float]:
    """Returns the ratios of a whole request over one with a state, and max_difference_state.

    speedup_state compares median times, speedup_state_processor the processor time of all threads.
    """
    model, whole, seen, since = long_model(config, size)
    states = GRMStates(model)
    _, state = states.update(seen, states.none(1))
    calls = {
        "whole": tf.function(lambda: model(whole, training=False), autograph=False),
        "state": tf.function(lambda: states.update(since, state)[0], autograph=False),
    }
    answers = {name: call() for name, call in calls.items()}
    for task, logits in answers["whole"].items():
        harness.check_close(task, answers["state"][task], logits, relative=1e-4, reason="sums in another order")
    difference = max(float(tf.reduce_max(tf.abs(answers["state"][task] - x))) for task, x in answers["whole"].items())
    # Times on the clock, and of the processor.
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(size.rounds):
        for name in list(calls) if turn % 2 else reversed(list(calls)):
            begin = time.perf_counter(), time.process_time()
            calls[name]()["ctr"].numpy()
            times[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    ratios = np.median(times["whole"], axis=0) / np.median(times["state"], axis=0)
    return {
        "speedup_state": float(ratios[0]),
        "speedup_state_processor": float(ratios[1]),
        "max_difference_state": difference,
    }


def fill(model: Any, table: str, ids: np.ndarray, random: np.random.Generator) -> None:
    """Gives the ids of a table random rows."""
    rows = random.normal(0, 0.1, [len(ids), model.config.dim]).astype(np.float32)
    fr.checkpoint.warm_start(model, table, ids, rows)


def batch_of(
    config: RankingConfig, lengths: np.ndarray, candidates: int, items: int, random: np.random.Generator
) -> Batch:  # fmt: skip
    """Returns inputs of users with histories of these lengths, and `candidates` exposures each."""
    row_lengths = {"history": lengths, "exposed": np.full(len(lengths), candidates)}
    batch = {name: tf.constant(random.integers(0, IDS, len(lengths))) for name in config.contextual}
    for role, counts in row_lengths.items():
        total = int(counts.sum())
        values = {name: random.integers(0, IDS, total) for name in config.columns_of(role)}
        values[f"{role}_item"] = random.zipf(1.2, total) % items
        values[f"{role}_time"] = np.full(total, 31 * DAY)
        if role == "history":
            values["history_action"] = random.integers(0, 4, total)
            values["history_time"] = np.sort(random.integers(0, 30 * DAY, total))
        batch |= {
            name: tf.RaggedTensor.from_row_lengths(tf.constant(x, tf.int64), counts) for name, x in values.items()
        }
    return batch


def flat(batch: Batch) -> dict[str, tf.Tensor]:
    """Returns a batch in the form of a server's inputs."""
    values = {name: x.values if isinstance(x, tf.RaggedTensor) else x for name, x in batch.items()}
    return {**values, **{f"{role}_row_splits": batch[f"{role}_time"].row_splits for role in ("history", "exposed")}}


def asking(server: Server, requests: Sequence[Mapping[str, tf.Tensor]]) -> Callable[[], object]:
    """Returns a call that sends the next request, in turns, and waits for its answer."""
    turns = itertools.cycle(requests)
    return lambda: [output.numpy() for output in server(**next(turns)).values()]
