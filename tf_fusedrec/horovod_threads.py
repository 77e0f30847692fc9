"""How the threads that Horovod starts share the processor with those that compute.

Gloo's loop thread waits with epoll, and skips an event while another thread holds the lock of that connection. The event
stays, so the loop spins. With fewer cores than threads the loop often wakes up on the core of the very thread that holds
the lock, takes that core, and spins there until its time slice ends: 4 ms, two or three times a step of 20 ms.

Linux lets a thread of the policy SCHED_BATCH wait for a free core instead of taking one when it wakes up. It gets the
same share of the processor, and needs no privilege.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

_LOG = logging.getLogger("tf_fusedrec.horovod_threads")


@contextlib.contextmanager
def without_preemption() -> Iterator[None]:
    """Threads that this thread starts meanwhile, and theirs, run under SCHED_BATCH, unless it has a policy of its own."""
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        _LOG.warning("Horovod's threads may spin on the cores that compute: SCHED_BATCH is refused (%s).", error)
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
