"""Turns of variants on all ranks of a benchmark, timed by the slowest rank. All functions are collective."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import harness
from tf_fusedrec.exchange import collectives, horovod_threads

AS_LAUNCHED = "tfra_as_launched"  # TFRA in a job that calls hvd.init alone


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
      variants: Functions of the inputs. AS_LAUNCHED runs without the policy of fr.init, which keeps Gloo from taking
        cores from computing threads.
      warmup, repeats: Numbers of repeats that are not measured, and that are.
      inputs: Returns the arguments of all variants in a repeat, which is negative during the warm-up.
    """
    names, threads = list(variants), horovod_threads.threads_without_preemption()
    seconds = np.zeros([2, len(names), repeats])
    for repeat in range(-warmup, repeats):
        arguments = inputs(repeat)
        for turn in range(len(names)):
            n = (repeat + turn) % len(names)
            as_launched = horovod_threads.with_preemption(threads) if names[n] == AS_LAUNCHED else None
            with as_launched or contextlib.nullcontext():
                collectives.barrier()
                begin = time.perf_counter(), time.process_time()
                variants[names[n]](*arguments)
                if repeat >= 0:
                    seconds[:, n, repeat] = time.perf_counter() - begin[0], time.process_time() - begin[1]
                collectives.barrier()  # lets the other ranks' turns end under the same policy
    by_rank = collectives.all_gather(seconds[np.newaxis])
    wall, cpu = by_rank[:, 0].max(axis=0), by_rank[:, 1].mean(axis=0)
    return Turns(dict(zip(names, wall)), dict(zip(names, cpu)))


def check_losses(losses: Mapping[str, Any], tolerance: float) -> None:
    """Raises CheckFailed unless all variants have the first one's losses at every step, and the losses change."""
    first, *others = losses
    for name in others:
        reason = "float32 sums in another order, amplified by training"
        what = f"losses of {name} by step against the losses of {first}"
        harness.check_close(what, losses[name], losses[first], relative=tolerance, reason=reason)
    if np.ptp(losses[first]) < 100 * tolerance:
        raise harness.CheckFailed(f"losses of {first} do not move, so they compare nothing: {losses[first]}.")


def print_on_rank_0(what: str) -> None:
    if collectives.rank() == 0:
        print(what, flush=True)
