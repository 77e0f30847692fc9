"""Native tables beside tables of PyTorch in another interpreter. Both interpreters take turns.

The peers' tables are static, with row numbers 0 .. rows - 1 as ids. Here a row number is the place of the id among all
ids in ascending order, so that frequent rows are not neighbours.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import harness
from benchmarks.harness.processes import Remote
from benchmarks.table import peer_torch
from benchmarks.table.work import BAG, INTERVAL, QUANTIZED_BAGS, Work, all_ids, make_work, random_rows, serve_steps

STEPS = 4  # of a turn
# By peer, our variant with the same rule and the same form of output: name, optimizer, ids of a bag, and words.
PAIRS = {
    "fbgemm_sequence": ("sequence", "rowwise_adagrad_mean", 0, "row-wise Adagrad, a row per id"),
    "fbgemm_pooled": ("pooled", "rowwise_adagrad_mean", BAG, f"row-wise Adagrad, sums of {BAG} rows"),
    "torch_sgd": ("sgd", "sgd", 0, "SGD, a row per id"), "torch_adam": ("adam", "adam", 0, "Adam, a row per id"),
}  # fmt: skip
# Sums of gradients are exact (work.py). FBGEMM sums squares in another order, and torch adds gradients one by one.
TOLERANCE = 1e-4


def ours(folder: str, threads: int, variants: list[list[Any]], checked: int) -> None:
    """Our side, in this project's interpreter. A variant is name, optimizer and ids of a bag (0: a row per id)."""
    from benchmarks.table.__main__ import Native
    from tf_fusedrec import tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    ids, gradients, resident = (np.load(pathlib.Path(folder) / f"{x}.npy") for x in ("ids", "gradients", "resident"))

    def step(table: Native, inputs: Sequence[tf.Tensor], of_rows: tf.Tensor, n: int) -> tf.Tensor:
        return table.step(inputs[n % len(inputs)], of_rows)

    steps = {}
    for name, optimizer, bag in variants:
        table = Native(optimizer, gradients.shape[1], "sum" if bag else None)
        table.fill(resident)
        inputs = [tf.constant(batch.reshape(-1, bag) if bag else batch) for batch in ids]
        steps[name] = functools.partial(step, table, inputs, tf.constant(gradients[: len(inputs[0])]))
    serve_steps(folder, steps, checked)


def served(folder: str, threads: int, variants: list[list[Any]], checked: int) -> None:
    """Our side of `quantized`, an export in int8. A variant is name, operations of the server, ids of a bag."""
    import tf_fusedrec as fr
    from benchmarks.table.__main__ import Native
    from tf_fusedrec import keras, tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    ids, resident, gradients = (np.load(pathlib.Path(folder) / f"{x}.npy") for x in ("ids", "resident", "gradients"))
    ascending, dim = np.sort(resident), gradients.shape[1]
    table = Native("sgd", dim, "sum")
    records = table.table.new_records("rows", len(ascending))
    records["row"] = random_rows(len(ascending), dim)
    table.table.restore("rows", "rows", ascending, records)
    inputs = keras.Input([None], dtype=tf.int64)
    model = keras.Model(inputs, table.layer({"ids": inputs})["ids"])
    spec = tf.TensorSpec([None, None], tf.int64)
    signature = fr.Signature(lambda given: {"rows": model(given["ids"])}, {"ids": spec})
    loaded = {}
    for ops in {ops for _, ops, _ in variants}:
        export = pathlib.Path(folder) / ops
        fr.export(model, export, ops, row_dtype="int8", signatures={"rows": signature})
        loaded[ops] = tf.saved_model.load(str(export))

    def step(ops: str, bags: Sequence[tf.Tensor], n: int) -> tf.Tensor:
        return loaded[ops].signatures["rows"](ids=bags[n % len(bags)])["rows"]

    steps = {
        name: functools.partial(step, ops, [tf.constant(batch.reshape(-1, bag)) for batch in ids])
        for name, ops, bag in variants
    }
    serve_steps(folder, steps, checked)


def write_work(folder: pathlib.Path, work: Work, resident: np.ndarray) -> None:
    """Writes ids.npy <int64>[BATCHES, N], numbers.npy (their row numbers), gradients.npy and resident.npy."""
    ascending = np.sort(resident)
    numbers = np.searchsorted(ascending, work.ids)
    harness.check_equal("ids of the row numbers that the peers get", ascending[numbers], work.ids)
    arrays = {"ids": np.stack(work.ids), "numbers": numbers.astype(np.int64), "gradients": work.gradients}
    for name, array in {**arrays, "resident": resident}.items():
        np.save(folder / f"{name}.npy", array)


def turns(
    python: str, theirs: Callable[..., None], work: Work, rows: int, pairs: Mapping[str, Sequence[Any]], *,
    steps: int, repeats: int, threads: int, ours: Callable[..., None] = ours, tolerance: float = TOLERANCE,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Compares the rows of both sides after a turn of `steps`. Returns the ms of steps by variant, [repeats, steps].

    `theirs` is a function of peer_torch, and `pairs` has our variant by peer, as PAIRS. CheckFailed: the interpreter
    `python` lacks a library, or rows differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_work(pathlib.Path(folder), work, all_ids(rows))
        with Remote(python, theirs, folder=folder, threads=threads) as their_side:
            their_side.check_libraries()
            variants = [list(variant[:3]) for variant in pairs.values()]
            request: dict[str, Any] = {"folder": folder, "threads": threads, "variants": variants, "checked": steps}
            with Remote(sys.executable, ours, **request) as our_side:
                return take_turns(their_side, our_side, pathlib.Path(folder), pairs, steps, repeats, tolerance)


def take_turns(
    theirs: Remote, our_side: Remote, folder: pathlib.Path, pairs: Mapping[str, Sequence[Any]], steps: int,
    repeats: int, tolerance: float = TOLERANCE,
) -> dict[str, np.ndarray]:  # fmt: skip
    theirs.check(), our_side.check()
    sides: dict[str, Remote] = {}
    for peer, (mine, *_) in pairs.items():
        rows = (np.load(folder / f"{name}.npy") for name in (mine, peer))
        harness.check_close(f"rows of {mine} against the rows of {peer}", *rows, relative=tolerance)
        sides |= {peer: theirs, mine: our_side}
    ms: dict[str, list[list[float]]] = {name: [] for name in sides}
    for repeat, name in harness.in_turns(list(sides), repeats, warmup=1):
        taken = sides[name].steps(name, steps)
        ms[name] += [taken] if repeat >= 0 else []
    return {name: 1e3 * np.array(taken) for name, taken in ms.items()}


def compare(python: str, *, rows: int, threads: int, repeats: int) -> list[dict[str, Any]]:
    work = make_work(rows)
    ms = turns(python, peer_torch.tables, work, rows, PAIRS, steps=STEPS, repeats=repeats, threads=threads)
    step_ms, n = {name: float(np.median(taken)) for name, taken in ms.items()}, 1e3 * len(work.ids[0])
    return [
        {
            "peer": peer, "rule": rule, "rows": rows, "threads": threads, "ms_ours": step_ms[mine],
            "ms_peer": step_ms[peer], "ids_per_s_ours": n / step_ms[mine], "ids_per_s_peer": n / step_ms[peer],
            "ratio": step_ms[peer] / step_ms[mine],
        }
        for peer, (mine, _, _, rule) in PAIRS.items()
    ]  # fmt: skip


# TorchRec's managed collisions (MTGRBoost, table 3) map raw ids to the rows of a table of fixed size by a binary search
# in sorted ids. At every INTERVAL-th step they sort them again, give numbers to new ids, and evict old ones. All ids
# have a row before, so neither side evicts.
COLLISION_DIMS = (32, 256, 2048)
COLLISION_ROWS, COLLISION_IDS = 200_000, 8192


def collisions(python: str, dim: int, rounds: int) -> dict[str, Any]:
    """Returns one record. `factor` is dim / 32, the "1D" of the paper. ms_peer_between is a peer's step without a sort.

    Other times are means over the steps of an interval, medians over rounds.
    """
    work, pairs = make_work(COLLISION_ROWS, n=COLLISION_IDS, dim=dim), {"mch": ("ours", "rowwise_adagrad_mean", 0)}
    ms = turns(
        python, peer_torch.managed_collisions, work, COLLISION_ROWS, pairs, steps=INTERVAL, repeats=rounds,
        threads=len(os.sched_getaffinity(0)),
    )  # fmt: skip
    of_interval = {name: float(np.median(taken.mean(axis=1))) for name, taken in ms.items()}
    return {
        "dim": dim, "factor": dim // COLLISION_DIMS[0], "rows": COLLISION_ROWS, "ids": COLLISION_IDS,
        "ms_ours": of_interval["ours"], "ms_peer": of_interval["mch"], "ms_peer_between": float(np.median(ms["mch"])),
        "ratio": of_interval["mch"] / of_interval["ours"],
    }  # fmt: skip


# A server's rows in 8 or 4 bits. Ours are found by their ids, FBGEMM's by their places in an array. This package has no
# rows in 4 bits, so FBGEMM's stand beside ours in 8.
QUANTIZED_DIMS, QUANTIZED_IDS = (32, 128), 20_480
# A number in b bits differs by at most 1 / (2^b - 1) of the largest. A sum differs by about as much of the largest sum.
ROUNDING = {"int8": 0.01, "int4": 0.1}


def quantized(python: str, dtype: str, dim: int, ops: str, *, rows: int, repeats: int) -> list[dict[str, Any]]:
    """Returns a record for each size of a bag: sums of rows in `dtype`, "int8" or "int4", by FBGEMM. One thread.

    ops: The operations of our server, as in fr.export.
    """
    work = make_work(rows, n=QUANTIZED_IDS, dim=dim)
    pairs = {f"{dtype}_{bag}": (f"ours_{bag}", ops, bag) for bag in QUANTIZED_BAGS}
    ms = turns(
        python, peer_torch.quantized, work, rows, pairs, steps=STEPS, repeats=repeats, threads=1, ours=served,
        tolerance=ROUNDING[dtype],
    )  # fmt: skip
    step_ms = {name: float(np.median(taken)) for name, taken in ms.items()}
    return [
        {
            "peer_rows": dtype, "our_ops": ops, "dim": dim, "bag": bag, "rows": rows, "ids": QUANTIZED_IDS,
            "ms_ours": step_ms[mine], "ms_peer": step_ms[peer], "ratio": step_ms[peer] / step_ms[mine],
        }
        for peer, (mine, _, bag) in pairs.items()
    ]  # fmt: skip
