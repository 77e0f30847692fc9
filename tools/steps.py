"""Runs long commands of the set-up: output into a log, progress on the screen, the log's tail on failure."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

TAIL_LINES = 25  # Lines of a failed command's log in the error.
# A compiler, pip or make writes this before the reason. The tail of a long build shows later errors only.
REASON = re.compile(r"(^|\s)(fatal )?error: ", re.IGNORECASE)
REASON_LINES = 3
# Words in the log of a failed command -> what the user can do.
REMEDIES = {
    r"No space left on device": (
        "make room, or point XDG_CACHE_HOME and TMPDIR to a larger disk. The same command then continues."
    ),
    r"IncompleteRead|incomplete-download|Connection broken|ConnectionResetError|ReadTimeoutError|ProxyError": (
        "the network or a proxy cut the download. Run the same command again; pip keeps the files that are whole. "
        "PIP_RETRIES=10 and PIP_TIMEOUT=120 make pip more patient."
    ),
    r"is not a supported wheel on this platform": (
        "the wheel is for another Python or machine; its name says which. Take the wheel of this Python, or build it."
    ),
}
LOOK_BACK = 50_000  # Bytes at the end of the log that are searched for the progress text.
WIDTH = 100  # Columns of a line of progress when the output is no terminal.
PROGRESS_S = 30.0  # Seconds between two lines of progress when the output is no terminal.


class StepFailed(Exception):
    """A step of the set-up failed. The message is for the user."""


def clean_environment(venv: pathlib.Path) -> dict[str, str]:
    """Returns the environment variables inside the virtual environment, without those that mislead the builds.

    `make` passes its own flags down, Horovod reads build options from HOROVOD_*, and PYTHONPATH would put foreign
    packages before the virtual environment's.
    """
    misleading = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH", "PYTHONHOME")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_") and k not in misleading}
    path = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, "VIRTUAL_ENV": str(venv), "PYTHONNOUSERSITE": "1"}


def run_logged(
    command: list[str], log: pathlib.Path, cwd: pathlib.Path, env: dict[str, str], progress: str = r"\S.*"
) -> float:
    """Runs `command` and returns its seconds.

    Args:
      command: Program and arguments.
      log: File for the output. Its folder is created.
      cwd: Working directory of the command.
      env: Environment variables of the command.
      progress: Pattern of the output that the screen shows in the meantime.

    Raises:
      StepFailed: The exit code is not 0. The message has the first reasons, the log's tail and its path, and a remedy
        for a reason of REMEDIES.
    """
    started = time.monotonic()
    with run_beside(command, log, cwd, env, progress):
        pass
    return time.monotonic() - started


@contextlib.contextmanager
def run_beside(
    command: list[str], log: pathlib.Path, cwd: pathlib.Path, env: dict[str, str], progress: str = r"\S.*"
) -> Iterator[None]:
    """Runs a command, as run_logged does, while the body runs, and waits for both. A failed body ends the command."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as stream:
        stream.write(f"$ {shlex.join(command)}\n")
        stream.flush()
        # The command inherits the set-up's lock (object_cache.locked). An interruption ends its session: all children.
        child = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, close_fds=False,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield
        _wait(child, log, progress)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        child.wait()
        raise
    if child.returncode != 0:
        text = log.read_text(errors="replace", encoding="utf-8")
        remedy = next((f"\n  Remedy: {known}" for words, known in REMEDIES.items() if re.search(words, text)), "")
        lines = text.splitlines()
        earlier = [line for line in lines[:-TAIL_LINES] if REASON.search(line)][:REASON_LINES]
        told = [*earlier, *(["..."] if earlier else []), *lines[-TAIL_LINES:]]
        raise StepFailed(
            "\n".join(f"      | {line.strip()}" for line in told)
            + f"\nerror: this command ended with {child.returncode}: {shlex.join(command)}"
            + f"\n  The whole log: {log}{remedy}"
        )


def last_line(log: pathlib.Path, pattern: str) -> str:
    """Returns the last text in the log that matches `pattern`, or "" without a match."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - LOOK_BACK))
        lines = stream.read().decode(errors="replace").split("\n")
    matches = (re.search(pattern, line) for line in reversed(lines))
    return next((match[0].strip() for match in matches if match), "")


def _wait(child: subprocess.Popen[bytes], log: pathlib.Path, progress: str) -> None:
    """Waits for a command. Shows its seconds and the log's last match: on one line of a terminal, or now and then."""
    started = shown = time.monotonic()
    width = os.get_terminal_size().columns - 1 if sys.stdout.isatty() else None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.5)
            break
        now = time.monotonic()
        text = f"      {now - started:.0f} s  {last_line(log, progress)}"
        if width is not None:
            print(f"\r{text[:width].ljust(width)}", end="", flush=True)
        elif now - shown >= PROGRESS_S:
            shown = now
            print(f"      {textwrap.shorten(text, WIDTH, placeholder=' ...')}", flush=True)
    if width is not None:
        print("\r" + " " * width + "\r", end="", flush=True)
