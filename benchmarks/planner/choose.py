"""fr.plan in a process of its own: its forecast of every choice of benchmarks.planner."""

from __future__ import annotations

from typing import Any

import tf_fusedrec as fr
from benchmarks.harness import children
from benchmarks.overlap.device_model import Compute, DeviceSize, Pace, make_batch, make_model
from benchmarks.overlap.variants import VARIANTS
from benchmarks.planner.workloads import INSIDE_BYTES_PER_S, MICRO_BATCHES, RANKS, RANKS_PER_HOST, TOLERATED
from tf_fusedrec import tf
from tf_fusedrec.schedules import Sync


def main(
    size: dict[str, Any], compute: dict[str, Any], paces: list[dict[str, float]], names: list[str]
) -> list[list[dict[str, Any]]]:
    """Returns, for each pace, the forecasts of the choices, the chosen one first.

    Args:
      size: Fields of DeviceSize.
      compute: Fields of Compute.
      paces: `device`, `memory`, `message_s` and `bytes_per_s` of each network.
      names: Names of overlap.variants.VARIANTS.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    of_size, pace = DeviceSize(**size), Pace()
    model = make_model(of_size, Compute(**compute), pace, "planned", Sync())
    variants = {name: VARIANTS[name] for name in names}
    answers = []
    for one in paces:
        pace.set(device=one["device"], memory=one["memory"])
        cluster = fr.Cluster(
            RANKS, 1e12, RANKS_PER_HOST, INSIDE_BYTES_PER_S, one["bytes_per_s"], latency_s=one["message_s"]
        )  # fmt: skip
        found = fr.plan(model, make_batch(of_size, 0), cluster, micro_batches=MICRO_BATCHES, tolerate=TOLERATED)
        answers.append([
            {"choice": name, "ms": 1e3 * forecast.step_s, "bytes": forecast.embedding_bytes}
            for forecast in found.forecasts
            for name, one in variants.items()
            if (one.schedule, one.topology, one.wire) == (forecast.schedule, forecast.topology, forecast.wire_dtype)
        ])  # fmt: skip
    return answers


if __name__ == "__main__":
    children.answer(main)
