"""Starts the watchdog of a rank. Limits come from the caller, the environment, or the defaults here."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tf_fusedrec.exchange.watchdog.board import Board
from tf_fusedrec.exchange.watchdog.ending import Ending
from tf_fusedrec.exchange.watchdog.watchdog import Watchdog

REPORT_AFTER_S = 60.0
GIVE_UP_AFTER_S = 600  # Horovod's own default of 30 s would end a job with a slow disk.
_REPORT_AFTER = "FUSEDREC_REPORT_AFTER_SECONDS"
_GIVE_UP_AFTER = "HOROVOD_GLOO_TIMEOUT_SECONDS"


def start_watchdog(
    size: int, members: Mapping[str, tuple[int, ...]], report_after_s: float | None, give_up_after_s: int | None
) -> Ending | None:
    """Starts the watchdog. Call it before hvd.init, so that it reports a rank that does not join.

    Args:
      size: Number of ranks.
      members: See Watchdog.
      report_after_s, give_up_after_s: See collectives.init.

    Returns:
      Exit handlers to install after hvd.init; None for a job without a board.

    Raises:
      ValueError: a limit is not positive.
    """
    if give_up_after_s is not None:
        os.environ[_GIVE_UP_AFTER] = str(give_up_after_s)
    gives_up = int(os.environ.setdefault(_GIVE_UP_AFTER, str(GIVE_UP_AFTER_S)))
    if report_after_s is None:
        report_after_s = float(os.environ.get(_REPORT_AFTER, REPORT_AFTER_S))
    if report_after_s <= 0 or gives_up <= 0:
        raise ValueError(
            f"report_after_s and give_up_after_s must be positive, got {report_after_s} and {gives_up}. To silence the "
            "reports, use a large number of seconds."
        )
    rank, board = int(os.environ["HOROVOD_RANK"]), Board.of_job()
    watchdog = Watchdog(
        rank, size, board, report_after_s=report_after_s, gives_up_after_s=gives_up, members=members
    )  # fmt: skip
    watchdog.start()
    if board is None:
        return None
    return Ending(rank, board, watchdog, report_after_s=report_after_s, gives_up_after_s=gives_up)
