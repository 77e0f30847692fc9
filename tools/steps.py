"""How the set-up runs a long command: output into a log, signs of life on the screen, the log's tail on failure.

Used by setup_env.py and horovod_wheel.py.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

TAIL_LINES = 25  # of a failed command's log
# What a compiler, pip or make writes before the reason; the tail of a long build shows what followed from it.
REASON = re.compile(r"(^|\s)(fatal )?error: ", re.IGNORECASE)
REASON_LINES = 3
LOOK_BACK = 50_000  # bytes of the log in which the last sign is searched
SIGN_OF_LIFE_S = 30.0  # between two lines of progress where the screen is not a terminal


class StepFailed(Exception):
    """A step of the set-up did not succeed; the message is for the user."""


def last_sign(log: pathlib.Path, sign: str) -> str:
    """The last part of a line in the log that matches the pattern `sign`, "" when there is none."""
    with log.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - LOOK_BACK))
        lines = stream.read().decode(errors="replace").split("\n")
    matches = (re.search(sign, line) for line in reversed(lines))
    return next((match[0].strip() for match in matches if match), "")


class Progress:
    """Shows the seconds and the log's last sign: rewritten in place, or a line now and then."""

    def __init__(self, log: pathlib.Path, sign: str) -> None:
        self._log = log
        self._sign = sign
        self._started = self._shown = time.monotonic()
        self._terminal = sys.stdout.isatty()

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def show(self) -> None:
        now = time.monotonic()
        if self._terminal:
            width = os.get_terminal_size().columns - 1
            text = f"      {self.seconds():.0f} s  {last_sign(self._log, self._sign)}"
            sys.stdout.write("\r" + text[:width].ljust(width))
        elif now - self._shown >= SIGN_OF_LIFE_S:
            self._shown = now
            sys.stdout.write(f"      {self.seconds():.0f} s  {last_sign(self._log, self._sign)[:90]}\n")
        sys.stdout.flush()

    def clear(self) -> None:
        if self._terminal:
            width = os.get_terminal_size().columns - 1
            sys.stdout.write("\r" + " " * width + "\r")
            sys.stdout.flush()


def clean_environment(venv: pathlib.Path) -> dict[str, str]:
    """The environment inside the virtual environment, without what would lead the builds astray.

    `make` hands its own flags down, Horovod reads build options from HOROVOD_*, and PYTHONPATH
    would put foreign packages before those of the virtual environment.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HOROVOD_")
        and name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH", "PYTHONHOME")
    }
    path = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, "VIRTUAL_ENV": str(venv), "PYTHONNOUSERSITE": "1"}


def run_logged(
    command: list[str],
    log: pathlib.Path,
    cwd: pathlib.Path,
    env: dict[str, str],
    sign: str = r"\S.*",
) -> float:
    """Runs `command` and returns its seconds.

    Args:
      log: file that takes the output; its folder is made.
      sign: pattern of what is shown of the output meanwhile.

    Raises:
      StepFailed: it did not end with 0; the message carries the first reasons, the log's tail and its place.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as stream:
        stream.write(f"$ {shlex.join(command)}\n")
        stream.flush()
        child = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            close_fds=False,  # a lock that the set-up holds (horovod_wheel.locked) is held by its commands too
            start_new_session=True,  # so that an interruption can end all that it started
        )
    progress = Progress(log, sign)
    try:
        while True:
            try:
                child.wait(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                progress.show()
    except KeyboardInterrupt:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait()
        raise
    finally:
        progress.clear()
    if child.returncode != 0:
        lines = log.read_text(errors="replace", encoding="utf-8").splitlines()
        earlier = [line for line in lines[:-TAIL_LINES] if REASON.search(line)][:REASON_LINES]
        shown = [*earlier, *(["..."] if earlier else []), *lines[-TAIL_LINES:]]
        raise StepFailed(
            "\n".join(f"      | {line.strip()}" for line in shown)
            + f"\nerror: this command ended with {child.returncode}: {shlex.join(command)}"
            + f"\n  The whole log: {log}"
        )
    return progress.seconds()
