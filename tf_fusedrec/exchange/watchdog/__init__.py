"""Reports which rank keeps others waiting, and ends ranks that wait for an ended rank. See watchdog.py."""

from tf_fusedrec.exchange.watchdog.start import start_watchdog

__all__ = ["start_watchdog"]
