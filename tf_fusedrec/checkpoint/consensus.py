"""Work that succeeds on all ranks or fails on all ranks, so that no rank waits for one that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tf_fusedrec.exchange import collectives

T = TypeVar("T")


def agree(work: Callable[[], T]) -> T:
    """Runs `work` on every rank and returns this rank's result if all ranks succeeded. Collective.

    Raises:
      Exception: the exception that `work` raised on this rank.
      RuntimeError: `work` failed on another rank only; the message quotes the failure.
    """
    failure = None
    try:
        result = work()
    except Exception as error:  # The other ranks must learn of any failure before it propagates here.
        failure = error
    messages = collectives.all_gather_object(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    failures = {rank: message for rank, message in enumerate(messages) if message is not None}
    if failures:
        rank, message = next(iter(failures.items()))
        raise RuntimeError(f"It failed on rank {rank}, so no rank goes on: {message}")
    return result


def on_rank_0(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and returns its result on every rank. The result must be picklable. Collective.

    Raises:
      Exception, RuntimeError: `work` failed; see agree.
    """
    result = agree(work if collectives.rank() == 0 else lambda: None)
    return collectives.all_gather_object(result)[0]
