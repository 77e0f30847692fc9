"""How the threads that Horovod starts share the processor with those that compute.

Gloo's loop thread waits with epoll, and skips an event while another thread holds the lock of that connection. The
event stays, so the loop spins. With fewer cores than threads the loop often wakes up on the core of the very thread
that holds the lock. It takes that core and spins until its time slice ends: 4 ms, two or three times a step.

Linux lets a thread of the policy SCHED_BATCH wait for a free core instead of taking one when it wakes up. It gets the
same share of the processor, and needs no privilege. Threads inherit the policy of the thread that starts them. A
program that called hvd.init() has Gloo's loop already: it is a thread that waits in epoll.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import platform
from collections.abc import Iterator, Sequence

# Numbers of the system calls epoll_wait and epoll_pwait.
_EPOLL = {"x86_64": {"232", "281"}, "aarch64": {"22"}}
_THREADS = pathlib.Path("/proc/self/task")
_LOG = logging.getLogger("tf_fusedrec.exchange.horovod_threads")


@contextlib.contextmanager
def without_preemption() -> Iterator[None]:
    """Runs the threads that this thread starts inside, and their own threads, under SCHED_BATCH.

    A process with a policy other than the default one keeps it.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    try:
        _set_policy([0], os.SCHED_BATCH)
    except OSError as error:
        _LOG.warning("Horovod's threads may spin on the cores that compute: SCHED_BATCH is refused (%s).", error)
        yield
        return
    try:
        yield
    finally:
        _set_policy([0], os.SCHED_OTHER)


def threads_without_preemption() -> list[int]:
    """Returns the numbers of this process's threads under SCHED_BATCH."""
    threads = [int(path.name) for path in _THREADS.iterdir()]
    return [thread for thread in threads if os.sched_getscheduler(thread) == os.SCHED_BATCH]


def stop_preemption_of_waiting_threads() -> None:
    """Puts threads that wait in epoll, Gloo's loop among them, under SCHED_BATCH.

    A thread with a policy other than the default one keeps it.
    """
    calls = _EPOLL.get(platform.machine(), set())
    try:
        for path in _THREADS.iterdir():
            thread, call = int(path.name), (path / "syscall").read_text(encoding="utf-8").split()[0]
            if call in calls and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                _set_policy([thread], os.SCHED_BATCH)
    except OSError as error:
        _LOG.warning("Horovod was initialized before tf_fusedrec, and its threads may spin on cores (%s).", error)


@contextlib.contextmanager
def with_preemption(threads: Sequence[int]) -> Iterator[None]:
    """Gives threads the default policy inside, as Horovod starts them by itself."""
    _set_policy(threads, os.SCHED_OTHER)
    try:
        yield
    finally:
        _set_policy(threads, os.SCHED_BATCH)


def _set_policy(threads: Sequence[int], policy: int) -> None:
    for thread in threads:
        os.sched_setscheduler(thread, policy, os.sched_param(0))
