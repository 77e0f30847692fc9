"""Turns of variants on all ranks of a benchmark, timed by the slowest rank. All functions are collective."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import harness
from tf_fusedrec.exchange import collectives

CHECKED = 12  # steps whose losses are compared
LOSS_TOLERANCE = 1e-5  # float32 sums in another order differ by 1e-7, and a dozen training steps amplify that


class Turns(NamedTuple):
    """Seconds of each turn by variant, <float64>[repeats]."""

    wall: dict[str, np.ndarray]  # of the slowest rank
    cpu: dict[str, np.ndarray]  # processor time of a rank's process, mean over ranks

    @property
    def ms(self) -> dict[str, float]:
        """Median milliseconds by variant."""
        return {name: 1e3 * float(np.median(seconds)) for name, seconds in self.wall.items()}


def turns(
    variants: Mapping[str, Callable[..., Any]], *, warmup: int, repeats: int,
    inputs: Callable[[int], tuple[Any, ...]] = lambda repeat: (),
) -> Turns:  # fmt: skip
    """Times the variants in turns. Each repeat starts with another variant, and all begin a turn together.

    Args:
      variants: Functions of the inputs.
      warmup, repeats: Numbers of repeats that are not measured, and that are.
      inputs: Returns the arguments of all variants in a repeat, which is negative during the warm-up.
    """
    names = list(variants)
    seconds = np.zeros([2, len(names), repeats])
    inputs = functools.lru_cache(maxsize=1)(inputs)  # all variants of a repeat share them
    for repeat, name in harness.in_turns(names, repeats, warmup):
        arguments = inputs(repeat)
        collectives.barrier()
        begin = time.perf_counter(), time.process_time()
        variants[name](*arguments)
        if repeat >= 0:
            seconds[:, names.index(name), repeat] = time.perf_counter() - begin[0], time.process_time() - begin[1]
    return of_all_ranks(names, seconds)


def of_all_ranks(names: Sequence[str], seconds: np.ndarray) -> Turns:
    """Joins what every rank measured: <float64>[2, variants, repeats], wall-clock and processor seconds."""
    by_rank = collectives.all_gather(seconds[np.newaxis])
    wall, cpu = by_rank[:, 0].max(axis=0), by_rank[:, 1].mean(axis=0)
    return Turns(dict(zip(names, wall)), dict(zip(names, cpu)))


def check_losses(losses: Mapping[str, Any]) -> float:
    """Raises CheckFailed unless all variants have the first one's losses at every step, and the losses change.

    Returns the largest difference of two losses on any rank.
    """
    first, *others = losses
    for name in others:
        reason = "float32 sums in another order, amplified by training"
        what = f"losses of {name} by step against the losses of {first}"
        harness.check_close(what, losses[name], losses[first], relative=LOSS_TOLERANCE, reason=reason)
    if np.ptp(losses[first]) < 100 * LOSS_TOLERANCE:
        raise harness.CheckFailed(f"losses of {first} do not move, so they compare nothing: {losses[first]}.")
    largest = np.ptp(list(losses.values()), axis=0).max(keepdims=True)
    return float(collectives.all_gather(largest).max())


def compare_steps(
    steps: Mapping[str, Any], batch: Callable[[int], tuple[Any, ...]], *, warmup: int, repeats: int
) -> dict[str, Any]:
    """Compares the losses of training steps, then times the steps in turns on new batches.

    `steps` are tf.functions by name, "ours" among them. `batch` has the arguments of a step by number. Returns ms_*,
    cpu_ms_* (medians) and ratio_vs_* (over the time of "ours") by variant; alltoalls_per_step, counted in the graphs;
    and max_loss_difference over steps, variants and ranks.
    """
    difference = check_losses({name: [float(step(*batch(n))) for n in range(CHECKED)] for name, step in steps.items()})
    times = turns(steps, warmup=warmup, repeats=repeats, inputs=lambda n: batch(CHECKED + warmup + n))
    graphs = {name: step.get_concrete_function(*batch(0)).graph.as_graph_def() for name, step in steps.items()}
    cpu = {f"cpu_ms_{name}": 1e3 * float(np.median(seconds)) for name, seconds in times.cpu.items()}
    return {
        **{f"ms_{name}": ms for name, ms in times.ms.items()}, **cpu,
        **{f"ratio_vs_{name}": ms / times.ms["ours"] for name, ms in times.ms.items() if name != "ours"},
        "alltoalls_per_step": {
            name: harness.count_nodes(graph, *collectives.ALL_TO_ALLS) for name, graph in graphs.items()
        },
        "max_loss_difference": difference,
    }  # fmt: skip


def print_on_rank_0(what: str) -> None:
    if collectives.rank() == 0:
        print(what, flush=True)
