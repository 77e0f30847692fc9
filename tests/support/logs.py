"""The log of a rank, which has no caplog."""

import contextlib
import logging


@contextlib.contextmanager
def logged(logger, level=logging.NOTSET):
    """Yields a list that gets the messages of tf_fusedrec.<logger> inside the block."""
    messages, handler, log = [], logging.Handler(), logging.getLogger(f"tf_fusedrec.{logger}")
    handler.emit = lambda record: messages.append(record.getMessage())
    log.setLevel(level)
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)
