"""Applies deltas to a served stock export under load, and compares its latency with windows without deltas."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tf_fusedrec import keras, tf
from tf_fusedrec.saved_model import applying, server_changes
from tf_fusedrec.saved_model.overlay import groups_of


@dataclasses.dataclass(frozen=True)
class Updates:
    """Windows with and without a delta, in turns."""

    windows: int = 6  # of each kind
    every: float = 10.0  # seconds of a window; a delta comes at its start
    changed: float = 0.01  # share of a table's rows that a delta changes


def update_fields(
    model: keras.Model, export: pathlib.Path, rows: dict[str, int], ask: Callable[[Any, int], None], size: Updates
) -> dict[str, float]:
    """Returns p99_ratio_with_delta_every_10s and delta_visible_s, the longest time from a call to a new answer.

    Args:
      model: The exported model.
      export: A stock export.
      rows: Number of rows by table.
      ask: Sends the n-th request to a signature and waits for the answer.
      size: Windows and size of the deltas.
    """
    deltas = _write_deltas(model, export, rows, size)
    loaded = tf.saved_model.load(str(export))
    server, apply = loaded.signatures["serving_default"], loaded.signatures["apply_delta"]
    for warm_up in range(4):
        ask(server, warm_up)
    visible: list[float] = []

    def bring(delta: pathlib.Path) -> None:
        begin = time.perf_counter()
        apply(path=tf.constant(str(delta)))
        ask(server, 0)
        visible.append(time.perf_counter() - begin)

    bring(deltas[0])  # The first delta optimizes the signature's graph.
    visible.clear()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for window in range(2 * size.windows):
        with_delta = window % 2 == 1
        update = threading.Thread(target=bring, args=[deltas[1 + window // 2]])
        end = time.perf_counter() + size.every
        if with_delta:
            update.start()
        number = 0
        while (begin := time.perf_counter()) < end:
            ask(server, number)
            number += 1
            seconds[with_delta].append(time.perf_counter() - begin)
        if with_delta:
            update.join()
    p99 = {with_delta: float(np.percentile(values, 99)) for with_delta, values in seconds.items()}
    return {"p99_ratio_with_delta_every_10s": p99[True] / p99[False], "delta_visible_s": max(visible)}


def _write_deltas(
    model: keras.Model, export: pathlib.Path, rows: dict[str, int], size: Updates
) -> Sequence[pathlib.Path]:
    """Writes a chain of deltas with random rows and the model's dense weights."""
    described = json.loads((export / applying.DESCRIPTION).read_text(encoding="utf-8"))
    groups, random = groups_of(described["tables"]), np.random.default_rng(0)
    weights = [weight.numpy() for weight in model.variables]
    version, deltas = described["version"], []
    for number in range(size.windows + 1):
        changes = {}
        for group in groups:
            for name in group.names:
                ids = np.sort(random.choice(rows[name], max(1, int(size.changed * rows[name])), replace=False))
                values = random.normal(0, 0.1, [len(ids), group.dim]).astype(group.dtype.as_numpy_dtype)
                nothing = np.zeros(0, np.int64)
                changes[name] = {"ids": ids, "rows": applying.bytes_of(values), "removed": nothing}
        deltas.append(export.with_name(f"delta-{number}"))
        after = f"{number:0{server_changes.VERSION_BYTES}}"
        server_changes.write(deltas[-1], [version, after, described["layout"]], groups, changes, weights)
        version = after
    return deltas
