"""Question: what do merged tables, deduplication and balanced batches bring, one on top of the other?

    python -m benchmarks.papers.ladder [--quick] [--json FILE]

On two ranks (MTGRBoost, figure 13), a GRM with twelve tables trains the same rows in four variants. Each has one
technique more than the last:
  apart          rows and gradients of each table travel alone, all occurrences of ids travel, batches have a fixed
                 number of rows; the ids of all tables share a message in every variant
  merged         tables of equal options share lookup, exchange and update
  deduplicated   a batch's duplicate ids are removed before they travel
  balanced       batches of all ranks have equal cost, tokens and their squares
All variants remove duplicates at the owner, too, the paper's second stage: our probe finds them while it finds rows.
benchmarks.table.ablation shows its share. Lengths are log-normal with mean 600 and at most 3,000 events. The first
three variants train the same batches, so their losses must agree at every step. The variants take turns, step by step.

Fields: samples_per_s_<variant> (rows of all ranks), ratio_<variant> (over "apart"), ids_sent_<variant> (share of a
step's ids that travels), alltoalls_<variant> (of a step).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import tf_fusedrec as fr
from benchmarks.balance.__main__ import COST, LONGEST, MEAN, lengths
from benchmarks.harness import harness, processes
from benchmarks.harness.harness import ZipfIds
from tf_fusedrec import collectives, keras, ops, tf
from tf_fusedrec.data.plan import EpochPlan, all_positions
from tf_fusedrec.data.rows import Ragged, Rows, splits_of
from tf_fusedrec.exchange.collectives import ALL_TO_ALLS
from tf_fusedrec.models.build import columns, make_embedding, make_model
from tf_fusedrec.models.experiment import Experiment, from_dict

ROWS = 8  # of the mean length, in a rank's batch
EXPOSURES = 8  # of each row
ITEM_FEATURES = ("shop", "brand", "category", "city", "hour", "price", "position")
CONTEXT = ("user_id", "age", "device")
IDS = {"item": 100_000, "shop": 20_000, "user_id": 100_000}  # ids of a column; 1,000 of the others
_HOUR = 3600


class Variant(NamedTuple):
    merged: bool = False
    unique: bool = False
    balanced: bool = False


VARIANTS = {
    "apart": Variant(), "merged": Variant(True), "deduplicated": Variant(True, True),
    "balanced": Variant(True, True, True),
}  # fmt: skip


def experiment(merged: bool, longest: int = LONGEST) -> Experiment:
    """Returns a GRM with twelve tables. Other learning rates keep the tables apart, and change no row visibly."""
    tables = ("item", *ITEM_FEATURES, "action", *CONTEXT)
    rules = {
        name: {"name": "adam", "learning_rate": 0.001 * (1 + 1e-7 * (0 if merged else at))}
        for at, name in enumerate(tables)
    }
    return from_dict(
        {
            "name": "ladder", "task": "ranking", "data": {"source": "synthetic-ranking"},
            "model": {
                "kind": "grm", "contextual": list(CONTEXT), "item_features": list(ITEM_FEATURES),
                "max_history": longest, "max_exposures": EXPOSURES, "dim": 32, "num_blocks": 2, "num_heads": 1,
                "qk_dim": 32, "value_dim": 32, "time_buckets": 0,
            },
            "embedding": {
                "optimizer": "adam", "learning_rate": 0.001,
                "tables": {name: {"optimizer": rule} for name, rule in rules.items()},
            },
        }
    )  # fmt: skip


def make_rows(tokens: np.ndarray, seed: int = 0) -> Rows:
    """Returns rows with these numbers of history events, <int64>[B], and EXPOSURES exposures each."""
    random = np.random.default_rng(seed)
    splits = {"history": splits_of(tokens), "exposed": splits_of(np.full(len(tokens), EXPOSURES))}
    found: dict[str, Any] = {}
    for column in columns(experiment(merged=True).model, "train"):
        role, _, name = column.name.partition("_")
        if role not in splits:
            found[column.name] = ZipfIds(IDS.get(column.name, 1000), 1.05).draw(random, (len(tokens),))
            continue
        count = int(splits[role][-1])
        if column.dtype == "float32":  # a label
            values = random.integers(0, 2, count).astype(np.float32)
        elif name == "time":
            values = _HOUR * (np.arange(count) - np.repeat(splits[role][:-1], np.diff(splits[role])))
            values += 10**9 + (role == "exposed") * _HOUR * LONGEST
        else:
            values = ZipfIds(IDS.get(name, 1000), 1.05).draw(random, (count,))
        found[column.name] = Ragged(values, splits[role])
    return Rows(found, len(tokens))


def plan(tokens: np.ndarray, ranks: int, balanced: bool) -> list[list[np.ndarray]]:
    """Returns row numbers [step][rank], every row once: ROWS rows for each rank, or equal costs."""
    if not balanced:
        count = len(tokens) // (ranks * ROWS)
        parts = np.arange(count * ranks * ROWS).reshape(count, ranks, ROWS)
        return [list(step) for step in parts]
    weights, target = COST.weights(tokens, ROWS * MEAN)
    epoch = EpochPlan(weights, target, all_positions(len(tokens)), ranks, "global")
    return [[epoch.batch(rank, step) for rank in range(ranks)] for step in range(epoch.steps)]


def tensors(rows: Rows) -> dict[str, Any]:
    return {
        name: tf.RaggedTensor.from_row_splits(column.values, column.row_splits, validate=False)
        if isinstance(column, Ragged)
        else tf.constant(column)
        for name, column in rows.columns.items()
    }


class Step:
    """A model of a variant, and its training step, traced once."""

    def __init__(self, variant: Variant, longest: int):
        config = experiment(variant.merged, longest)
        keras.utils.set_random_seed(0)
        self.embedding = make_embedding(config)
        nothing = np.zeros(0, np.int64)
        self.model = make_model(config, self.embedding, nothing, nothing)
        self.model.compile(optimizer=collectives.distributed_optimizer(keras.optimizers.Adam(1e-3)))
        signature = {
            column.name: tf.RaggedTensorSpec([None, None], column.dtype)
            if column.ragged
            else tf.TensorSpec([None], column.dtype)
            for column in columns(config.model, "train")
        }
        with contextlib.nullcontext() if variant.unique else _duplicates_travel():
            self.function = tf.function(self.model.train_step, autograph=False).get_concrete_function(signature)

    def __call__(self, batch: dict[str, Any]) -> float:
        """Trains, and returns the loss over all ranks since the beginning."""
        return float(self.function(batch)["loss"])

    def ids(self) -> tuple[int, int]:
        """Returns the ids that this rank has asked for, and those that it has sent."""
        counts = np.sum([group.traffic.numpy() for group in self.embedding.internals.groups], axis=0)
        return int(counts[0]), int(counts[1])


@contextlib.contextmanager
def _duplicates_travel() -> Iterator[None]:
    """Lets every occurrence of an id travel, with a row and a gradient of its own, in what is traced inside."""

    def keep_all(ids: tf.Tensor, splits: tf.Tensor) -> ops.UniqueIds:
        return ops.UniqueIds(ids, splits, tf.range(tf.size(ids)))

    with mock.patch.object(ops, "segment_unique", keep_all):
        yield


def epoch_s(
    steps: Mapping[str, Callable[[Any], Any]], batches: Mapping[str, Sequence[Any]], rounds: int
) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """Times epochs of variants with batches of their own, in turns step by step. Collective.

    Returns the median seconds of an epoch by variant, of the slowest rank, and what its steps returned in an epoch
    before, which is not timed.
    """
    seconds = {name: np.zeros(rounds) for name in steps}
    results: dict[str, list[Any]] = {name: [] for name in steps}
    for turn in range(-1, rounds):
        for at in range(max(map(len, batches.values()))):
            for name in (name for name, of_variant in batches.items() if at < len(of_variant)):
                fr.collectives.barrier()
                begin = time.perf_counter()
                result = steps[name](batches[name][at])
                fr.collectives.barrier()
                if turn < 0:
                    results[name].append(result)
                else:
                    seconds[name][turn] += time.perf_counter() - begin
    slowest = {name: fr.collectives.all_gather(of_rank[np.newaxis]).max(axis=0) for name, of_rank in seconds.items()}
    return {name: float(np.median(of_rounds)) for name, of_rounds in slowest.items()}, results


RANKS = 2
# Sums of the same gradients in another order, and learning rates that differ by 1e-6 at most.
LOSS_TOLERANCE = 1e-4


def measure(count: int, rounds: int) -> dict[str, Any]:
    rank, tokens = fr.rank(), lengths(count * RANKS * ROWS, seed=3)
    rows = make_rows(tokens)
    batches, steps = {}, {}
    for name, variant in VARIANTS.items():
        numbers = plan(tokens, RANKS, variant.balanced)
        every = np.sort(np.concatenate([part for step in numbers for part in step]))
        harness.check_equal(f"rows of {name}", every, np.arange(len(tokens)))
        batches[name] = [tensors(rows.take(step[rank])) for step in numbers]
        steps[name] = Step(variant, LONGEST)
    seconds, losses = epoch_s(steps, batches, rounds)
    for name in ("merged", "deduplicated"):
        harness.check_close(f"losses, {name}", losses[name], losses["apart"], relative=LOSS_TOLERANCE)
    fields: dict[str, Any] = {f"samples_per_s_{name}": len(tokens) / epoch for name, epoch in seconds.items()}
    fields |= {f"ratio_{name}": seconds["apart"] / epoch for name, epoch in seconds.items()}
    for name, step in steps.items():
        asked, sent = collectives.all_gather(np.array([step.ids()])).sum(axis=0)
        fields[f"ids_sent_{name}"] = float(sent / asked)
        graph = step.function.graph.as_graph_def()
        fields[f"alltoalls_{name}"] = harness.count_nodes(graph, *ALL_TO_ALLS)
    if not fields["ids_sent_deduplicated"] < fields["ids_sent_merged"] == 1:
        raise harness.CheckFailed(f"Without deduplication all ids must travel, with it fewer: {fields}.")
    return fields


def on_rank(count: int, rounds: int) -> dict[str, Any]:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    fr.init()
    return measure(count, rounds)


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    count, rounds = (4, 1) if arguments.quick else (10, 7)
    fields = processes.ask_ranks(on_rank, RANKS, count=count, rounds=rounds)
    harness.print_fields("ladder", fields)
    harness.write_json(arguments.json, {"benchmark": "ladder", **fields})


if __name__ == "__main__":
    processes.program(main)
