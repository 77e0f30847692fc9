"""A cable between two namespaces that delays every frame, for kernels without netem. It needs root and /dev/net/tun.

Each end is a TAP device named eth0. A thread of this process takes the frames of one end and hands them to the other
after the delay. Frames have up to 65,000 bytes, so that a rate of 1 Gbit/s is 2,000 frames a second, which take a tenth
of a core. The thread has real-time priority, because a frame that waits for a core would be delayed for longer.

    set_delay(path, 0.001)      # by any process, while the cable is in use
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import fcntl
import mmap
import os
import pathlib
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence

DEVICE = pathlib.Path("/dev/net/tun")
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0002, 0x1000, 0x40000000
_MTU = 65_000
_SECONDS = struct.Struct("d")
_STOP_AFTER_S = 0.2  # longest wait, after which the thread looks whether it shall end


def set_delay(path: pathlib.Path, seconds: float) -> None:
    """Sets the time that a frame takes from one end of the cable to the other."""
    with path.open("r+b") as file:
        file.write(_SECONDS.pack(seconds))


@contextlib.contextmanager
def between(names: Sequence[str], path: pathlib.Path) -> Iterator[None]:
    """Lays a cable between two namespaces. Its devices exist, but have no address and are down.

    Args:
      names: Names of the two namespaces.
      path: File that is made for the delay in seconds, 0 at first.
    """
    path.write_bytes(_SECONDS.pack(0.0))
    with concurrent.futures.ThreadPoolExecutor(1) as entered, contextlib.ExitStack() as stack:
        ends = []  # a thread enters the namespaces, and this one stays outside
        for name in names:
            ends.append(entered.submit(_tap, name).result())
            stack.callback(os.close, ends[-1])
            subprocess.run(["ip", "-n", name, "link", "set", "eth0", "mtu", str(_MTU)], check=True)
        ended = threading.Event()
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as delay:
            relay = threading.Thread(target=_relay, args=(ends, delay, ended), name="delayed cable", daemon=True)
            relay.start()
            try:
                yield
            finally:
                ended.set()
                relay.join()


def _tap(name: str) -> int:
    """Makes the device eth0 in a namespace, and moves the calling thread there. Returns its file descriptor."""
    with pathlib.Path("/run/netns", name).open("rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")
    end = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    return end


def _relay(ends: Sequence[int], delay: mmap.mmap, ended: threading.Event) -> None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    others = dict(zip(ends, reversed(ends)))
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()  # by the time when a frame is due
    while not ended.is_set():
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, end, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # a device that is down or full drops the frame, as a card does
                os.write(end, frame)
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else _STOP_AFTER_S
        for end in select.select(ends, [], [], timeout)[0]:
            with contextlib.suppress(BlockingIOError):
                frame = os.read(end, _MTU + 64)
                waiting.append((time.monotonic() + _SECONDS.unpack(delay[:8])[0], others[end], frame))
