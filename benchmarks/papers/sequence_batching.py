"""Question: how much forward computation does one row per user save over one row per exposure (MTGRBoost, Fig. 4)?

    python -m benchmarks.papers.sequence_batching [--config FILE] [--data DIR] [--quick] [--json FILE]

GRM counts the multiplications and additions of its matrix products (`forward_flops`), from the lengths of a data set's
training rows. It times nothing. Attention counts the visible pairs, which a kernel without padding computes. The count
omits element-wise work and embedding lookups. Both layouts give the same exposures the same scores
(tests/models/ranking/test_grm.py).
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

from benchmarks.harness import harness, processes
from tf_fusedrec import tf
from tf_fusedrec.data import ParquetFolder
from tf_fusedrec.models.build import columns, make_embedding, make_model
from tf_fusedrec.models.experiment import Experiment, load
from tf_fusedrec.models.grm import GRM
from tf_fusedrec.models.prepare import prepare_data

QUICK_USERS = 200


def measure(experiment: Experiment, folder: pathlib.Path, max_users: int | None) -> dict[str, Any]:
    """Returns the FLOPs of both layouts over the first max_users training rows, and their ratio."""
    model = make_model(experiment, make_embedding(experiment), np.arange(1), np.ones(1, np.int64))
    if not isinstance(model, GRM):
        raise ValueError(f"--config is {experiment.name!r}, which has no GRM. Name one that has, such as grm_tiny.")
    lengths = [
        [rows.ragged(name).lengths() for name in ("history_item", "exposed_item")]
        for rows in ParquetFolder(folder / "train", columns(experiment.model, "train")).read()
    ]
    history, exposed = (np.concatenate(parts)[:max_users] for parts in zip(*lengths))

    def flops(**row_lengths: np.ndarray) -> float:
        batch = {
            name: tf.RaggedTensor.from_row_lengths(tf.zeros([counts.sum()], tf.int8), counts)
            for name, counts in row_lengths.items()
        }
        return float(model.forward_flops(batch))

    repeated = np.repeat(history, exposed)
    by_user = flops(history_item=history, exposed_item=exposed)
    by_exposure = flops(history_item=repeated, exposed_item=np.ones_like(repeated))
    return {
        "data": folder.name, "users": len(history), "exposures": int(exposed.sum()),
        "mean_history_tokens": float(history.mean()), "row_per_user": by_user, "row_per_exposure": by_exposure,
        "saving": by_exposure / by_user,
    }  # fmt: skip


def main() -> None:
    parser = harness.parser(__doc__, f"the first {QUICK_USERS} users only")
    parser.add_argument("--config", default="configs/grm_tiny.yaml", help="a ranking experiment")
    parser.add_argument("--data", default="", help="data set, which replaces data.input")
    arguments = parser.parse_args()
    overrides = [f"data.input={json.dumps(arguments.data)}"] if arguments.data else []
    try:
        with tempfile.TemporaryDirectory() as temporary:
            experiment = load(arguments.config, overrides)
            result = measure(experiment, prepare_data(experiment, temporary), QUICK_USERS if arguments.quick else None)
    except ValueError as error:
        sys.exit(f"error: {error}")
    harness.print_fields("forward operations of one row per user and of one per exposure", result)
    harness.write_json(arguments.json, result)


if __name__ == "__main__":
    processes.program(main)
