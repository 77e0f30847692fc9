"""Networks of Linux namespaces: a slow loop-back, and two hosts on one cable. They need root.

A namespace takes its links, its limits and its processes with it when it ends. The cable may delay every frame, also on
kernels without netem; that needs /dev/net/tun.
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
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any


def why_not() -> str | None:
    """Returns the reason why this process cannot make namespaces, or None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {missing[0]} (Debian: iproute2)"
    try:
        with namespace() as name:
            limit("lo", "1gbit", "-n", name)
    except subprocess.CalledProcessError as error:
        return f"this kernel refuses: {' '.join(error.cmd)}: {error.stderr.strip()}"
    return None


def inside(name: str, command: Sequence[str]) -> list[str]:
    return ["ip", "netns", "exec", name, *command]


@contextlib.contextmanager
def namespace() -> Iterator[str]:
    """Makes a namespace with Reno's congestion control.

    BBR, which some hosts choose, sends next to nothing for 200 ms every ten seconds.
    """
    name = f"fusedrec-{uuid.uuid4().hex[:8]}"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run(*inside(name, ["sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"]))
        yield name
    finally:
        _end_processes(name)
        _run("ip", "netns", "del", name)


def limit(device: str, rate: str, *tc_options: str) -> None:
    """Limits a device to `rate` (such as "1gbit") by a token bucket, which every kernel has.

    It is a device of this process's namespace, or of another with the options "-n", name.
    """
    _run("tc", *tc_options, "qdisc", "replace", "dev", device, "root",
         "tbf", "rate", rate, "burst", "256kb", "latency", "200ms")  # fmt: skip


@contextlib.contextmanager
def slow_loopback(rate: str) -> Iterator[str]:
    """Makes a namespace whose loop-back traffic, of all processes and both directions, shares `rate`."""
    with namespace() as name:
        limit("lo", rate, "-n", name)
        yield name


HOSTS = {"first-host": "10.0.0.1", "second-host": "10.0.0.2"}  # addresses inside the two namespaces


@contextlib.contextmanager
def two_hosts(
    folder: pathlib.Path, delay: pathlib.Path | None = None
) -> Iterator[tuple[list[str], dict[str, str]]]:  # fmt: skip
    """Makes two namespaces that are joined by an eth0 each and know each other by the names of HOSTS.

    horovodrun reaches other hosts by ssh. A namespace has no ssh server, so a stand-in named ssh in `folder` enters the
    namespace with an empty environment, as ssh has. `delay` is the file of the cable's delay (set_delay). Yields the
    words before a command that runs on the first host, and the environment in which it finds the stand-in.
    """
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(namespace()) for _ in HOSTS]
        if delay is None:
            pair = ["netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1]]
            _run("ip", "link", "add", "eth0", *pair)
        else:
            stack.enter_context(delayed_cable(names, delay))
        for name, address in zip(names, HOSTS.values()):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            stack.enter_context(_etc_hosts(name))
        ssh = folder / "ssh"
        cases = [f"  {host}) set -- {shlex.join(_on_host(name, host))} ;;" for name, host in zip(names, HOSTS)]
        ssh.write_text(_SSH.replace("CASES", "\n".join(cases)), encoding="utf-8")
        ssh.chmod(0o755)
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        yield _on_host(names[0], next(iter(HOSTS))), {**os.environ, "PATH": path}


@contextlib.contextmanager
def spread(ranks: int, delay: pathlib.Path | None = None) -> Iterator[dict[str, Any]]:
    """Makes two hosts for an even number of ranks, half on each. Yields arguments of processes.ask_ranks.

    Between the hosts is a cable without a limit (`delay`: see two_hosts). Ranks limit it by `limit("eth0", rate)`,
    one on each host. Traffic inside a host does not pass the cable.
    """
    with tempfile.TemporaryDirectory() as folder, two_hosts(pathlib.Path(folder), delay) as (inside_first, environment):
        hosts = ",".join(f"{host}:{ranks // len(HOSTS)}" for host in HOSTS)
        # The card is named, or horovodrun may choose lo, at which the hosts do not reach each other.
        options = ["-H", hosts, "--network-interfaces", "eth0", "--disable-cache"]
        yield {"inside": inside_first, "options": options, "variables": {"PATH": environment["PATH"]}}


def _on_host(name: str, host: str) -> list[str]:
    """Returns the words before a command that runs in a namespace under the host name `host`."""
    return inside(name, ["unshare", "--uts", "sh", "-c", _RENAME, host])


_RENAME = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'


@contextlib.contextmanager
def _etc_hosts(name: str) -> Iterator[None]:
    """Puts HOSTS into /etc/hosts of a namespace: `ip netns exec` lays this folder over /etc."""
    folder = pathlib.Path("/etc/netns") / name
    folder.mkdir(parents=True)
    try:
        lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in HOSTS.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
        yield
    finally:
        shutil.rmtree(folder)


_SSH = """#!/bin/sh
# ssh [-opi VALUE ...] HOST [-opi VALUE ...] COMMAND
host=
while [ $# -gt 0 ]; do
  case "$1" in
    -*) shift 2 ;;
    *) if [ -z "$host" ]; then host=$1; shift; else break; fi ;;
  esac
done
command="$*"
case "$host" in
CASES
  *) echo "no host $host" >&2; exit 255 ;;
esac
exec env -i PATH="$PATH" HOME="$HOME" "$@" sh -c "$command"
"""


def _end_processes(name: str) -> None:
    listed = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace")


TAP_DEVICE = pathlib.Path("/dev/net/tun")
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0002, 0x1000, 0x40000000
_MTU = 65_000
_SECONDS = struct.Struct("d")
_STOP_AFTER_S = 0.2  # longest wait, after which the thread looks whether it shall end


def set_delay(path: pathlib.Path, seconds: float) -> None:
    """Sets the time that a frame takes from one end of the cable to the other."""
    with path.open("r+b") as file:
        file.write(_SECONDS.pack(seconds))


@contextlib.contextmanager
def delayed_cable(names: Sequence[str], path: pathlib.Path) -> Iterator[None]:
    """Lays a cable between two namespaces. Its devices exist, but have no address and are down.

    Each end is a TAP device named eth0. A thread of this process takes the frames of one end and hands them to the
    other after the delay in seconds that the file `path` has, 0 at first. Frames have up to 65,000 bytes, so that a
    rate of 1 Gbit/s is 2,000 frames a second, which take a tenth of a core. The thread has real-time priority: a frame
    that waits for a core is delayed for longer.
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
                # Not in the thread: an error there would leave the ranks waiting for frames.
                os.sched_setscheduler(relay.native_id or 0, os.SCHED_FIFO, os.sched_param(1))
                yield
            finally:
                ended.set()
                relay.join()


def _tap(name: str) -> int:
    """Makes the device eth0 in a namespace, and moves the calling thread there. Returns its file descriptor."""
    with pathlib.Path("/run/netns", name).open("rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")
    end = os.open(TAP_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    return end


def _relay(ends: Sequence[int], delay: mmap.mmap, ended: threading.Event) -> None:
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
