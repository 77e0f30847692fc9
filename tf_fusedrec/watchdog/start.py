"""Starts the watchdog of a rank, with the limits that its caller, its environment or this file name."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tf_fusedrec.watchdog.board import Board
from tf_fusedrec.watchdog.ending import Ending
from tf_fusedrec.watchdog.watchdog import Watchdog

REPORT_AFTER_S = 60.0
GIVE_UP_AFTER_S = 600  # Horovod's own default of 30 s ends a job whose disk is slow
_REPORT_AFTER = "FUSEDREC_REPORT_AFTER_SECONDS"
_GIVE_UP_AFTER = "HOROVOD_GLOO_TIMEOUT_SECONDS"


def start_watchdog(
    size: int, members: Mapping[str, tuple[int, ...]], report_after_s: float | None, give_up_after_s: int | None
) -> Ending | None:
    """Starts it before the processes join, so that it reports a rank that does not come.

    Args:
      size: number of ranks.
      members: see Watchdog.
      report_after_s, give_up_after_s: see collectives.init.

    Returns:
      What to install when the processes have joined; None for a job without a board.
    """
    if give_up_after_s is not None:
        os.environ[_GIVE_UP_AFTER] = str(give_up_after_s)
    gives_up = int(os.environ.setdefault(_GIVE_UP_AFTER, str(GIVE_UP_AFTER_S)))
    if report_after_s is None:
        report_after_s = float(os.environ.get(_REPORT_AFTER, REPORT_AFTER_S))
    if report_after_s <= 0 or gives_up <= 0:
        raise ValueError(
            f"report_after_s and give_up_after_s must be positive, got {report_after_s} and {gives_up}. To hear "
            "nothing of waiting ranks, give many seconds."
        )
    rank, board = int(os.environ["HOROVOD_RANK"]), Board.of_job()
    watchdog = Watchdog(
        rank, size, board, report_after_s=report_after_s, gives_up_after_s=gives_up, members=members
    )  # fmt: skip
    watchdog.start()
    if board is None:
        return None
    return Ending(rank, board, watchdog, report_after_s=report_after_s, gives_up_after_s=gives_up)
