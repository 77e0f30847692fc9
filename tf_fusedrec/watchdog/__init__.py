"""Says which rank keeps others waiting, and ends ranks that wait for one that is gone. See watchdog.py."""

from tf_fusedrec.watchdog.board import Board
from tf_fusedrec.watchdog.ending import Ending
from tf_fusedrec.watchdog.watchdog import Watchdog

__all__ = ["Board", "Ending", "Watchdog"]
