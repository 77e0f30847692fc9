"""Summary of the states of all ranks, and the sentences that a waiting rank prints. Pure functions.

A state is the report of one rank about itself:
  waits: [name, call, ranks] of each collective in which the rank waits; `ranks` are the participants.
  begun: number of begun calls of each collective, by name.
  idle: [name, call, seconds] of its last collective if the rank is in none, else None.
  ended: whether its program has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

State = Mapping[str, Any]
_MAX_NAMED = 8  # ranks that a sentence names one by one


def summarize(states: Mapping[int, State], silent: Mapping[int, float]) -> dict[str, Any]:
    """The summary that rank 0 publishes.

    Args:
      states: Last state of each rank, by rank. A rank without a report is missing.
      silent: Seconds since the last sign of life, by rank, for ranks that gave none in time.

    Returns:
      waits: For each collective in which a rank waits, its name, call and ranks, and `missing`: the calls begun by each
        rank that has not arrived.
      silent: Seconds of silence, by rank.
      idle: Last collective of each idle rank, by rank.
      ended: Ranks whose program has ended.
    """
    waits: dict[Any, dict[str, Any]] = {}
    for state in states.values():
        for name, call, ranks in state["waits"]:
            begun = {rank: states[rank]["begun"].get(name, 0) if rank in states else 0 for rank in ranks}
            missing = {str(rank): count for rank, count in begun.items() if count < call}
            waits[name, call, tuple(ranks)] = {"name": name, "call": call, "ranks": ranks, "missing": missing}
    return {
        "waits": list(waits.values()),
        "silent": {str(rank): seconds for rank, seconds in silent.items()},
        "idle": {str(rank): state["idle"] for rank, state in states.items() if state["idle"]},
        "ended": sorted(rank for rank, state in states.items() if state["ended"]),
    }


def whom_it_waits_for(summary: Mapping[str, Any], rank: int, name: str, call: int) -> str:
    """Words for the ranks that `rank` waits for in a call of a collective, such as "for rank 1, which ..."."""
    known = (wait for wait in summary["waits"] if (wait["name"], wait["call"]) == (name, call))
    wait = next((wait for wait in known if rank in wait["ranks"]), None)
    if wait is None:
        wait = {"ranks": [int(silent) for silent in summary["silent"]], "missing": {}}
        if not wait["ranks"]:
            return "for other ranks; which ones is not known yet"
    late = [_of_rank(str(other), wait, summary) for other in wait["ranks"]]
    named = [text for text in late if text]
    if not named:
        return "although all ranks have arrived: the network is slow, or Horovod is busy with another collective"
    more = f"; and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    return "for " + "; ".join(named[:_MAX_NAMED]) + more


def _of_rank(rank: str, wait: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    silence, made = summary["silent"].get(rank), wait["missing"].get(rank)
    if silence:
        after = f", after {made} of {wait['call']} calls" if made is not None else ""
        return f"rank {rank}, whose last sign of life came {silence:.0f} s ago{after} (stopped, or its host is lost)"
    if made is None:
        return ""
    text = f"rank {rank}, which has made {made} of {wait['call']} calls"
    others = [one["name"] for one in summary["waits"] if int(rank) in one["ranks"] and rank not in one["missing"]]
    idle = summary["idle"].get(rank)
    if others:
        return f"{text} and is in collective {others[0]!r}"
    return f"{text} and has been in no collective for {idle[2]:.0f} s" if idle else text


def left_behind(summary: Mapping[str, Any]) -> str | None:
    """Words that name an ended rank for which others wait forever; None if there is no such rank."""
    for wait in summary["waits"]:
        gone = [rank for rank in wait["missing"] if int(rank) in summary["ended"]]
        if gone:
            return (
                f"the program of rank {gone[0]} has ended after {wait['missing'][gone[0]]} calls of collective "
                f"{wait['name']!r}, and other ranks wait in call {wait['call']}. Usually the ranks' data ended "
                "at different steps, or the program raised SystemExit. Remedy: tf_fusedrec.schedules.PipelinedModel "
                "instead of keras.Model, which ends all ranks together, or the same steps_per_epoch on all ranks."
            )
    return None


def keeps_waiting(summary: Mapping[str, Any], rank: int) -> list[str]:
    """Names of the collectives in which other ranks wait for `rank`."""
    return [wait["name"] for wait in summary["waits"] if str(rank) in wait["missing"]]
