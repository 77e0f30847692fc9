"""Starts the ranks of a job, shows the output of rank 0, and says last why a job failed.

Horovod's rendezvous server joins the ranks. Every rank has a log with all its output. Ranks of another host run under
ssh. A shell there reads signals from ssh's input and passes them on. It kills its rank when the input ends.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import pty
import queue
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from tf_fusedrec.cli.main import DONE, RANK_FAILED, REFUSED, STOPPED

TO_END_S = 15.0  # seconds that the other ranks have to end after a rank has failed
OF_A_SIGNAL = 128  # A shell adds the number of the signal that ended a process.
REFUSAL = "error: "  # begins the line of a rank that refuses the user's settings or data
# Lines of ranks about the first failed one (tf_fusedrec/exchange/job_end.py, watchdog.py), the surest form first.
CAUSES = [re.compile(rf"^tf_fusedrec: rank (\d+){form}: (.+)$", re.MULTILINE) for form in (" failed first", ": failed")]
TRACEBACK = "Traceback (most recent call last):\n"
FRAME = re.compile(r'^  File "(.+)", line \d+, in .+\n(?:    .*\n)?', re.MULTILINE)
ERROR = re.compile(r"^[^ \n].*(?:\n(?!tf_fusedrec: ).+){0,9}", re.MULTILINE)  # of a traceback, below its frames
LIBRARY = re.compile(r"site-packages|/lib/python3|^<|" + re.escape(str(pathlib.Path(__file__).parents[1])))
# The shell becomes the rank. A part of it reads numbers of signals, and ends the rank when its input ends.
ON_HOST = (
    "exec 3<&0; (while read number <&3; do kill -$number $$; done; kill -KILL $$) >/dev/null 2>&1 & "
    'exec "$@" 3<&- </dev/null'
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares how many ranks there are, and where."""
    parser.add_argument(
        "-n", "--ranks", type=int, metavar="N", help="processes (default: 1, or all slots of the hosts)"
    )
    parser.add_argument("-H", "--hosts", default="", metavar="HOST:SLOTS,...", help="hosts, which ssh reaches")
    parser.add_argument("--hostfile", metavar="FILE", help='hosts, one "NAME slots=N" a line')
    parser.add_argument("--network-interface", default="", metavar="CARD", help="network card that connects the hosts")


def options(arguments: argparse.Namespace) -> list[str]:
    """Returns the options of add_options as words of a command line."""
    by_option = {"-n": arguments.ranks, "-H": arguments.hosts, "--hostfile": arguments.hostfile}
    by_option["--network-interface"] = arguments.network_interface
    return [str(word) for name, value in by_option.items() if value for word in (name, value)]


def is_rank() -> bool:
    """Whether a launcher has started this process: this one, or horovodrun."""
    return "FUSEDREC_RANK" in os.environ or "HOROVOD_RANK" in os.environ


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a job failed."""

    rank: int
    host: str
    pid: int | None  # None on another host
    seconds: float  # from the start of the job
    place: str  # the frame of the user's own code; "" if there is none
    cause: str

    def __str__(self) -> str:
        process = f", pid {self.pid}" if self.pid else ""
        lines = [*self.place.splitlines(), *self.cause.splitlines()]
        head = f"rank {self.rank} failed first (host {self.host}{process}, after {self.seconds:.0f} s):"
        return "\n".join([head, *(f"    {line}" for line in lines)])


class Rank:
    """A process of a job.

    Args:
      number: Its rank.
      host: Name of another host; "" for this one.
      command, env: The process.
      log: File that gets the output.
      shown: Streams that get standard output and errors, too; None for a rank that shows nothing.
    """

    def __init__(
        self, number: int, host: str, command: Sequence[str], env: Mapping[str, str], log: pathlib.Path,
        shown: tuple[TextIO, TextIO] | None,
    ):  # fmt: skip
        self.number, self.host, self.log = number, host, log
        self.file = log.open("ab")
        self.begin = self.file.tell()  # a resumed run writes on
        self.reader: threading.Thread | None = None
        output: Any = self.file
        if shown:
            # Programs draw progress for a terminal only, so rank 0 has one where the launcher has one.
            source, output = pty.openpty() if shown[0].isatty() else os.pipe()
            if shown[0].isatty():
                tty.setraw(output)
                size = fcntl.ioctl(shown[0].fileno(), termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(output, termios.TIOCSWINSZ, size)
        self.process = subprocess.Popen(
            over_ssh(host, command, env) if host else command, env=None if host else env, start_new_session=True,
            stdin=subprocess.PIPE if host else subprocess.DEVNULL, stdout=output,
            stderr=subprocess.PIPE if shown else subprocess.STDOUT, bufsize=0,
        )  # fmt: skip
        if shown:
            os.close(output)
            assert self.process.stderr is not None
            targets = {source: shown[0], self.process.stderr.fileno(): shown[1]}
            self.reader = threading.Thread(target=self._copy, args=[targets], daemon=True)
            self.reader.start()

    def wait(self) -> int:
        """Waits for the end and returns the exit code, as a shell would have it."""
        code = self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()
        if self.reader:
            self.reader.join()
        self.file.close()
        return OF_A_SIGNAL - code if code < 0 else code

    def report_end(self, events: queue.SimpleQueue[Rank | signal.Signals]) -> None:
        """Puts this rank into a queue when it has ended."""
        try:
            self.wait()
        finally:
            events.put(self)  # the launcher waits for it

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the rank's process. SIGKILL ends the rank's children, too."""
        with contextlib.suppress(ProcessLookupError, BrokenPipeError, ValueError):  # ValueError: stdin was closed
            if number == signal.SIGKILL:  # the end of ssh ends the rank of another host
                os.killpg(self.process.pid, number)
            elif self.process.stdin is None:
                self.process.send_signal(number)
            else:
                self.process.stdin.write(b"%d\n" % number)

    def _copy(self, targets: dict[int, TextIO]) -> None:
        """Copies streams to the screen, and their lines, without what a progress bar draws again, to the log."""
        partial = dict.fromkeys(targets, b"")
        while targets:
            for source in select.select([*targets], [], [])[0]:  # output before errors
                try:
                    block = os.read(source, 65536)
                except OSError:  # a terminal that no process has open
                    block = b""
                with contextlib.suppress(OSError):  # the terminal or the disk is gone, and rank 0 must not block
                    targets[source].buffer.write(block)
                    targets[source].flush()
                *lines, partial[source] = (partial[source] + block).split(b"\n")
                drawn = partial[source].rstrip(b"\r")  # a bar is kept as it was drawn last
                partial[source] = drawn.rpartition(b"\r")[2] + partial[source][len(drawn) :]
                if not block:
                    lines = [partial[source]] if partial[source] else []
                    del targets[source]
                with contextlib.suppress(OSError):
                    for line in lines:
                        self.file.write(line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n")
                    self.file.flush()


def over_ssh(host: str, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Returns the command that runs `command` in this folder on another host."""
    from horovod.runner.common.util.env import is_exportable
    from horovod.runner.util.remote import get_remote_command

    variables = [f"{name}={value}" for name, value in env.items() if is_exportable(name)]
    there = shlex.join(["env", *variables, "sh", "-c", ON_HOST, "sh", *command])
    return ["sh", "-c", get_remote_command(shlex.quote(f"cd {shlex.quote(os.getcwd())} && {there}"), host)]


def number_of_ranks(arguments: argparse.Namespace) -> int:
    """Returns the number of ranks that the options ask for. Raises ValueError as places."""
    slots = _slots(arguments)
    return arguments.ranks or sum(slots.values()) or 1


def _slots(arguments: argparse.Namespace) -> dict[str, int]:
    """Returns the most ranks of each host; {} for a single rank without Horovod. Raises ValueError as places."""
    number = 1 if arguments.ranks is None else arguments.ranks
    if number < 1:
        raise ValueError(f"-n must be at least 1, got {number}.")
    if number == 1 and not arguments.hosts and not arguments.hostfile:
        return {}
    try:
        from horovod.runner.common.util import hosts
    except ImportError as error:
        raise ValueError(f"-n {number} needs Horovod ({error}). Use -n 1, or install it: docs/install.md.") from error
    host_list = arguments.hosts
    if arguments.hostfile:
        if not os.path.isfile(arguments.hostfile):
            raise ValueError(f"--hostfile: no such file {arguments.hostfile!r}.")
        host_list = hosts.parse_host_files(arguments.hostfile)
    names, slots = hosts.parse_hosts_and_slots(host_list or f"localhost:{number}")
    return {name: slots[name] for name in names}


@contextlib.contextmanager
def places(arguments: argparse.Namespace) -> Iterator[list[tuple[str, dict[str, str]]]]:
    """Yields host ("" for this one) and environment variables of each rank, while the rendezvous server runs.

    Raises:
      ValueError: The options of the launcher do not fit, or several ranks are asked for without Horovod.
    """
    number, slots = number_of_ranks(arguments), _slots(arguments)
    if not slots:
        yield [("", {})]
        return
    from horovod.runner import gloo_run
    from horovod.runner.common.util import hosts
    from horovod.runner.http.http_server import RendezvousServer
    from horovod.runner.util import network

    remote = network.filter_local_addresses([*slots])
    if remote and not arguments.network_interface:
        raise ValueError(f"hosts {', '.join(remote)} need --network-interface, the card of the network, such as eth0.")
    cards = [arguments.network_interface] if arguments.network_interface else sorted(network.get_local_intfs())
    assigned = hosts.get_host_assignments(
        hosts.parse_hosts(",".join(f"{n}:{s}" for n, s in slots.items())), number, number
    )
    server = RendezvousServer(0)
    port = server.start()
    try:
        server.init(assigned)
        shared = gloo_run.create_run_env_vars(network.get_driver_ip(cards), cards, port)
        yield [
            (
                slot.hostname if slot.hostname in remote else "",
                {name: str(value) for name, value in {**shared, **gloo_run.create_slot_env_vars(slot)}.items()},
            )
            for slot in assigned
        ]
    finally:
        server.stop()


def launch(arguments: argparse.Namespace, command: Sequence[str], logs: pathlib.Path) -> tuple[int, Failure | None]:
    """Runs a command on all ranks until they end. Returns the exit code, and why the job failed.

    Ctrl-C, SIGTERM and the end of the terminal reach the ranks once as SIGINT, so that they can save; a second one ends
    them at once. Ranks that fail then, because no checkpoint can be written, have failed.

    Args:
      arguments: Options of add_options, and json. With json, the output of rank 0 goes to stderr.
      command: Program and arguments.
      logs: Folder that gets rank-N.log of each rank.

    Raises:
      ValueError: As places, or `logs` cannot be made.
    """
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the logs cannot be written: {error}. Use another folder.") from error
    shown = (sys.stderr if arguments.json else sys.stdout, sys.stderr)
    events: queue.SimpleQueue[Rank | signal.Signals] = queue.SimpleQueue()  # Rank: it has ended
    began = time.monotonic()
    ranks: list[Rank] = []
    codes: dict[Rank, int] = {}
    signals, failed, while_stopping, deadline = 0, None, False, None
    with places(arguments) as all_places, _signals(events.put):
        common = {**os.environ, "PYTHONUNBUFFERED": "1"}
        try:
            for number, (host, variables) in enumerate(all_places):
                env = {**common, **variables, "FUSEDREC_RANK": str(number)}
                log = logs / f"rank-{number}.log"
                ranks.append(Rank(number, host, command, env, log, None if number else shown))
                threading.Thread(target=ranks[-1].report_end, args=[events], daemon=True).start()
            while len(codes) < len(ranks):
                try:
                    event = events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    _send(ranks, signal.SIGKILL)
                    deadline = None
                    continue
                if isinstance(event, signal.Signals):
                    if event == signal.SIGHUP and signals:  # a shell and the kernel both tell that a terminal is gone
                        continue
                    signals += 1
                    if signals == 1:
                        with contextlib.suppress(OSError):  # the terminal is gone
                            print(
                                "\nstopping after this step; once more to end at once ...", file=sys.stderr, flush=True
                            )
                    _send(ranks, signal.SIGINT if signals == 1 else signal.SIGKILL)
                    continue
                codes[event] = event.wait()
                if codes[event] not in (DONE, STOPPED) and signals < 2 and failed is None:
                    now = time.monotonic()
                    failed, seconds, while_stopping = event, now - began, signals > 0
                    if not while_stopping:  # else another rank may be saving
                        deadline = now + TO_END_S
        finally:
            if len(codes) < len(ranks):
                _send(ranks, signal.SIGKILL)
    # A program without handlers ends one rank by the signal, and others by the collective that has lost this rank.
    if failed is None or (while_stopping and (signals > 1 or STOPPED in codes.values())):
        return STOPPED if signals or STOPPED in codes.values() else DONE, None  # a rank may have got the signal itself
    failure = why(ranks, failed, codes, seconds)
    if failure.cause.startswith(REFUSAL) and codes[failed] == REFUSED:
        if failure.rank:  # rank 0 has shown its own line
            print(failure.cause, file=sys.stderr)
        return REFUSED, failure
    healthy = [str(each.number) for each in ranks if each.number != failure.rank]
    subject, verb = ("rank", "was") if len(healthy) == 1 else ("ranks", "were")
    stopped = f"{subject} {', '.join(healthy)} {verb} healthy and stopped. " if healthy else ""
    print(f"\n{failure}\n{stopped}Full output of every rank: {logs}/rank-*.log", file=sys.stderr)
    return RANK_FAILED, failure


def why(ranks: Sequence[Rank], first: Rank, codes: Mapping[Rank, int], seconds: float) -> Failure:
    """Returns the reason of a failure: what the ranks say of it, else the end of the rank that ended first."""
    logs = [rank.log.read_bytes()[rank.begin :].decode("utf-8", errors="replace") for rank in ranks]
    named = next((match for form in CAUSES for log in logs if (match := form.search(log))), None)
    rank = ranks[int(named[1])] if named else first
    text, code = logs[rank.number], codes[rank]
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("tf_fusedrec: rank ")]
    place, error = "", ""
    if TRACEBACK in text:
        trace = text.rpartition(TRACEBACK)[2]
        frames = list(FRAME.finditer(trace))
        of_user = [frame for frame in frames if not LIBRARY.search(frame[1])] or frames
        place = "\n".join(line[2:] for line in of_user[-1][0].splitlines()) if of_user else ""
        match = ERROR.search(trace, frames[-1].end() if frames else 0)
        error = match[0].rstrip() if match else ""
    if code > OF_A_SIGNAL and not named:
        cause = killed_by(code - OF_A_SIGNAL)
    else:
        printed = lines[-1] if lines else f"it printed nothing, and ended with exit code {code}"
        cause = error or (named[2] if named else printed)
    pid = None if rank.host else rank.process.pid
    return Failure(rank.number, rank.host or socket.gethostname(), pid, seconds, place, cause)


def killed_by(number: int) -> str:
    """Returns words for the signal that ended a process."""
    names = {each.value: each.name for each in signal.Signals}
    reason = ", as Linux does when memory runs out" if number == signal.SIGKILL else ""
    return f"it was ended by {names.get(number, f'signal {number}')}{reason} (exit code {OF_A_SIGNAL + number})"


def _send(ranks: Sequence[Rank], number: signal.Signals) -> None:
    for rank in ranks:
        rank.send(number)


@contextlib.contextmanager
def _signals(note: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Calls `note` for each SIGINT, SIGTERM and SIGHUP, unless SIGHUP is ignored, as under nohup."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = [signal.signal(number, lambda number, _: note(signal.Signals(number))) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
