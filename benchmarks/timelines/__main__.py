"""Draws one step under Sync, FrozenWindow and Nested, for docs/img/timeline_*.png.

    python -m benchmarks.timelines FOLDER [PICTURE ...]

benchmarks.overlap has the same model and network of 1 Gbit/s. The callback fr.callbacks.Timeline records rank 0
of 2. The network needs root.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import tf_fusedrec as fr
from benchmarks.harness import harness, network, processes
from benchmarks.overlap.real_model import RANKS, SCHEDULES, SIZE, Size, dataset, make_embedding, make_model
from tf_fusedrec import keras, tf
from tf_fusedrec.callbacks.timeline import Timeline

PICTURES = {
    "sync": "sync",
    "frozen_window": "frozen_M4",
    "nested": "nested_M4",
}  # of overlap.real_model
FIRST, STEPS = 4, 7  # steps of each variant; the first ones create the rows


def record(size: dict[str, Any], names: list[str], folder: str) -> list[str] | None:
    """Runs one rank: trains each variant for a few steps. Rank 0 writes the pictures and returns their names."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    fr.init(timeline=True)
    keras.utils.disable_interactive_logging()
    batches, pictures = dataset(Size(**size)), []
    for name in names:
        model = make_model(Size(**size), make_embedding(Size(**size), name), SCHEDULES[PICTURES[name]])
        with tempfile.TemporaryDirectory() as recorded:
            timeline = Timeline(recorded, first_step=FIRST, steps=STEPS - FIRST)
            model.fit(batches, steps_per_epoch=STEPS, verbose=0, callbacks=[timeline])
            if fr.rank() == 0:
                pictures.append(f"timeline_{name}.png")
                shutil.copy(pathlib.Path(recorded) / "step.png", pathlib.Path(folder) / pictures[-1])
                print(f"{pictures[-1]}: steps of {[round(step.step_ms) for step in timeline.steps]} ms", flush=True)
    return pictures or None


def main(folder: pathlib.Path, names: Sequence[str]) -> None:
    """Writes the named pictures."""
    reason = network.why_not()
    if reason is not None:
        raise harness.CheckFailed(f"no pictures: {reason}")
    if not folder.is_dir() or not set(names) <= set(PICTURES):
        wanted = f"FOLDER must exist and every PICTURE must be one of {list(PICTURES)}"
        raise harness.CheckFailed(f"got FOLDER {folder} and PICTURE {list(names)}; {wanted}.")
    with network.slow_loopback("1gbit") as namespace:
        processes.ask_ranks(
            record, RANKS, inside=network.inside(namespace, []), size=dataclasses.asdict(SIZE), names=list(names),
            folder=str(folder.resolve()),
        )  # fmt: skip


if __name__ == "__main__":
    processes.program(lambda: main(pathlib.Path(sys.argv[1]), sys.argv[2:] or list(PICTURES)))
