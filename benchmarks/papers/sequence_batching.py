"""Question: how much forward computation does one row per user save over one row per exposure (MTGRBoost, Fig. 4)?

    python -m benchmarks.papers.sequence_batching --config configs/grm_tiny.yaml [--data DIR] [--json FILE] [--quick]

The benchmark counts the multiplications and additions of GRM's matrix products, from the lengths of a data set's
training rows. It times nothing. Attention counts the visible pairs, which a kernel without padding computes. The count
omits element-wise work and embedding lookups. Both layouts give the same exposures the same scores
(tests/models/ranking/test_grm.py).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import tempfile

import numpy as np

from benchmarks.harness import harness, processes
from models.build import columns
from models.experiment import Experiment, load
from models.experiment.model_config import GRMConfig
from models.prepare import prepare_data
from tf_fusedrec.data import ParquetFolder


@dataclasses.dataclass(frozen=True)
class Flops:
    """Forward floating point operations of a data set in one layout."""

    tokens: int
    projections: int  # in the HSTU blocks
    attention: int
    heads: int  # experts, gates and task heads

    @property
    def total(self) -> int:
        return self.projections + self.attention + self.heads


def forward_flops(config: GRMConfig, history: np.ndarray, exposed: np.ndarray) -> Flops:
    """Returns the FLOPs of rows with the given lengths."""
    context = len(config.contextual)
    tokens = int((context + history + exposed).sum())
    inner_qk, inner_value = config.num_heads * config.qk_dim, config.num_heads * config.value_dim
    per_token = 2 * config.dim * 2 * (inner_qk + inner_value) + 2 * inner_value * config.dim
    # Context sees context and history. History sees context and its past. A target also sees itself.
    pairs = context * (context + history) + history * context + history * (history + 1) // 2
    pairs = pairs + exposed * (context + history + 1)
    computed = min(config.num_experts, 2 * config.top_k)  # where two tasks keep different experts
    per_exposure = 2 * config.dim * computed * config.expert_units  # experts
    per_exposure += 2 * 2 * config.dim * config.num_experts  # gates of two tasks
    per_exposure += 2 * 2 * config.top_k * config.expert_units  # mixing
    per_exposure += 2 * 2 * (config.expert_units + 1) * config.head_units  # heads
    return Flops(
        tokens,
        config.num_blocks * tokens * per_token,
        config.num_blocks * int(pairs.sum()) * 2 * (inner_qk + inner_value),
        int(exposed.sum()) * per_exposure,
    )


QUICK_USERS = 200
LAYOUTS = ("row_per_user", "row_per_exposure")


def measure(experiment: Experiment, folder: pathlib.Path, max_users: int | None) -> dict:
    """Returns the FLOPs of both layouts over the first max_users training rows, and their ratio."""
    if not isinstance(experiment.model, GRMConfig):
        raise ValueError(f"--config is {experiment.name!r}, which has no GRM. Name one that has, such as grm_tiny.")
    history, exposed = [], []
    for rows in ParquetFolder(folder / "train", columns(experiment.model, "train")).read():
        history.append(rows.ragged("history_item").lengths())
        exposed.append(rows.ragged("exposed_item").lengths())
    history = np.concatenate([np.empty(0, np.int64), *history])[:max_users]
    exposed = np.concatenate([np.empty(0, np.int64), *exposed])[:max_users]
    by_user = forward_flops(experiment.model, history, exposed)
    repeated = np.repeat(history, exposed)
    by_exposure = forward_flops(experiment.model, repeated, np.ones_like(repeated))
    layouts = dict(zip(LAYOUTS, (by_user, by_exposure)))
    return {
        "data": folder.name,
        "users": len(history),
        "exposures": int(exposed.sum()),
        "mean_history_tokens": float(history.mean()) if len(history) else 0.0,
        **{name: {**dataclasses.asdict(f), "total": f.total} for name, f in layouts.items()},
        "saving": by_exposure.total / by_user.total if by_user.total else float("nan"),
    }


def main() -> None:
    parser = harness.parser(__doc__, f"the first {QUICK_USERS} users only")
    parser.add_argument("--config", default="configs/grm_tiny.yaml", help="a ranking experiment")
    parser.add_argument("--data", default="", help="data set, which replaces data.input")
    arguments = parser.parse_args()
    overrides = [f"data.input={json.dumps(arguments.data)}"] if arguments.data else []
    try:
        with tempfile.TemporaryDirectory() as temporary:
            experiment = load(arguments.config, overrides)
            folder = prepare_data(experiment, temporary)
            result = measure(experiment, folder, QUICK_USERS if arguments.quick else None)
    except ValueError as error:
        sys.exit(f"error: {error}")
    names = ("tokens", "projections", "attention", "heads", "total")
    rows = [{"forward": name, **{layout: result[layout][name] for layout in LAYOUTS}} for name in names]
    harness.print_table("operations, of one row per user and per exposure", rows)
    print(f"saving: {result['saving']:.2f} times fewer operations with one row per user")
    harness.write_json(arguments.json, result)


if __name__ == "__main__":
    processes.program(main)
