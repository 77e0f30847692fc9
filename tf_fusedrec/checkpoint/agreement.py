"""Where ranks agree: what fails on one of them fails on all, and nobody waits for a rank that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tf_fusedrec.exchange import collectives

T = TypeVar("T")


def agree(work: Callable[[], T]) -> T:
    """Runs `work` on this rank and returns its result when it succeeded on every rank. Collective.

    Raises:
      What `work` raised here, or RuntimeError: it failed on another rank only.
    """
    failure = None
    try:
        result = work()
    except Exception as error:  # whatever it is, the others must hear of it before it goes on
        failure = error
    told = collectives.all_gather_object(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    others = {rank: text for rank, text in enumerate(told) if text is not None}
    if others:
        rank, text = next(iter(others.items()))
        raise RuntimeError(f"It failed on rank {rank}, so no rank goes on: {text}")
    return result


def of_rank_0(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and returns its result, which must be picklable, on every rank. Collective.

    Raises:
      As agree.
    """
    result = agree(work if collectives.rank() == 0 else lambda: None)
    return collectives.all_gather_object(result)[0]
