"""Networks of Linux namespaces: a slow loop-back, and two hosts on one cable. They need root.

A namespace takes its links, its limits and its processes with it when it ends.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness import delayed_cable


def why_not() -> str | None:
    """Returns the reason why this process cannot make namespaces, or None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {missing[0]} (Debian: iproute2)"
    try:
        with namespace() as name:
            limit(name, "lo", "1gbit")
    except subprocess.CalledProcessError as error:
        return f"this kernel refuses: {' '.join(error.cmd)}: {error.stderr.strip()}"
    return None


def inside(name: str, command: Sequence[str]) -> list[str]:
    """Returns the command that runs `command` in a namespace."""
    return ["ip", "netns", "exec", name, *command]


@contextlib.contextmanager
def namespace() -> Iterator[str]:
    """Makes a namespace with a running loop-back. Yields its name."""
    name = f"fusedrec-{uuid.uuid4().hex[:8]}"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        _end_processes(name)
        _run("ip", "netns", "del", name)


def limit(name: str, device: str, rate: str) -> None:
    """Limits a device of a namespace to `rate` (such as "1gbit") by a token bucket, which every kernel has."""
    _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", *_bucket(rate))


def limit_here(device: str, rate: str) -> None:
    """Changes the limit of a device in the namespace of this process."""
    _run("tc", "qdisc", "replace", "dev", device, "root", *_bucket(rate))


def _bucket(rate: str) -> tuple[str, ...]:
    return ("tbf", "rate", rate, "burst", "256kb", "latency", "200ms")


@contextlib.contextmanager
def slow_loopback(rate: str) -> Iterator[str]:
    """Makes a namespace whose loop-back traffic, of all processes and both directions, shares `rate`."""
    with namespace() as name:
        limit(name, "lo", rate)
        yield name


HOSTS = {"first-host": "10.0.0.1", "second-host": "10.0.0.2"}  # addresses inside the two namespaces


@contextlib.contextmanager
def two_hosts(
    folder: pathlib.Path, delay: pathlib.Path | None = None
) -> Iterator[tuple[list[str], dict[str, str]]]:  # fmt: skip
    """Makes two namespaces that are joined by an eth0 each and know each other by the names of HOSTS.

    horovodrun reaches other hosts by ssh. A namespace has no ssh server, so a stand-in named ssh enters the namespace
    with an empty environment, as ssh has.

    Args:
      folder: Folder for the stand-in.
      delay: File of the cable's delay (delayed_cable.py). None: a cable without delay.

    Yields:
      The words before a command that runs on the first host, and the environment in which it finds the stand-in.
    """
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(namespace()) for _ in HOSTS]
        if delay is None:
            pair = ["netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1]]
            _run("ip", "link", "add", "eth0", *pair)
        else:
            stack.enter_context(delayed_cable.between(names, delay))
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
    """Makes two hosts for an even number of ranks, half of them on each. Between the hosts is a cable without a limit.

    Ranks limit it by `limit_here("eth0", rate)`, one on each host. Traffic inside a host does not pass the cable.

    Args:
      ranks: Number of ranks.
      delay: As in two_hosts.

    Yields:
      Arguments of children.ask_ranks.
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
