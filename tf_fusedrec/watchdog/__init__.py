"""Says which rank keeps others waiting, and ends ranks that wait for one that is gone. See watchdog.py."""

from tf_fusedrec.watchdog.start import start_watchdog

__all__ = ["start_watchdog"]
