"""`make train`: chooses the experiment for the data, and runs models.train on several processes by horovodrun.

horovodrun 0.28.1 puts "[0]<stdout>:" before every line and has no option against it. Here the
first process's output is shown as it is, that of the others with "rank 1: " before each line.

Ctrl-C is passed on to the training processes, which have time to end by themselves: horovodrun
alone would stop and kill them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from typing import IO

import psutil

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEFAULT_CONFIG = "configs/grm_tiny.yaml"
# Files by which a data set is recognised, and the experiment for it.
CONFIG_FOR_FILES = {
    ("ratings.dat", "ratings.csv", "ratings.csv.gz", "u.data"): "configs/hstu_ml1m_tiny.yaml",
    ("log.csv", "log.csv.gz"): "configs/grm_kuairand_tiny.yaml",
}
GRACE_S = 60.0  # from Ctrl-C until processes that did not end are killed
INTERRUPTED = 130  # exit code of a rank and of this program after Ctrl-C
LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
PREFIX = re.compile(rb"^\[(\d+)\]<std(?:out|err)>:")
FAILED_RANK = re.compile(rb"Process name: (\d+)\s+Exit code: (\d+)")
# What ranks say at their end about the first of them that failed (tf_fusedrec/watchdog/ending.py).
CAUSE = re.compile(rb"tf_fusedrec: rank (\d+)(?: failed first|: failed): (.+)")


def choose_config(data: str, config: str) -> str:
    """The experiment file: the one given, or that of the data set, or the default.

    Args:
      data: folder of a data set, "" for the synthetic one.
      config: experiment file, "" to choose it by the data.

    Raises:
      ValueError: a path that does not exist, or data of an unknown kind without a config.
    """
    if data and not pathlib.Path(data).is_dir():
        raise ValueError(f"DATA must be the folder of a data set, got {data!r}, which is no folder.")
    if config:
        if not pathlib.Path(config).is_file():
            known = ", ".join(sorted(f"configs/{path.name}" for path in ROOT.glob("configs/*.yaml")))
            raise ValueError(f"CONFIG must be an experiment file, got {config!r}. There are: {known}.")
        return config
    if not data:
        return DEFAULT_CONFIG
    for names, chosen in CONFIG_FOR_FILES.items():
        if any((pathlib.Path(data) / name).is_file() for name in names):
            return chosen
    wanted = "; ".join(" or ".join(names) for names in CONFIG_FOR_FILES)
    raise ValueError(
        f"DATA={data} holds none of the files by which a data set is recognised ({wanted}). "
        "Name the experiment file as well: CONFIG=configs/<name>.yaml."
    )


def horovodrun_command(processes: int, data: str, config: str) -> list[str]:
    # The script beside this interpreter. --disable-cache: its cache in the home folder remembers
    # checks of remote hosts, and there are none.
    launcher = pathlib.Path(sys.executable).parent / "horovodrun"
    command = [str(launcher), "-np", str(processes), "--gloo", "--disable-cache"]
    command += [sys.executable, "-m", "models.train", "--config", config]
    return command + (["--data", data] if data else [])


def plain(chunk: bytes) -> bytes:
    """One piece of horovodrun's output, up to a line feed or carriage return, without its prefix."""
    match = PREFIX.match(chunk)
    if match is None:
        return chunk
    rank, text = match.group(1), chunk[match.end() :]
    return text if rank == b"0" or not text.strip() else b"rank " + rank + b": " + text


def forward(source: IO[bytes], target: IO[bytes], last: list[bytes]) -> None:
    """Copies horovodrun's output to ours, piece by piece, until it ends.

    When a rank has failed, horovodrun ends with a traceback of itself, which would hide the
    rank's message above it: the first failed rank and its cause are told in its place.

    Args:
      source: what horovodrun writes.
      target: where it goes.
      last: gets what must stand below all output, of all streams.
    """
    pending, own_traceback, cause = b"", b"", None
    said: dict[bytes, bytes] = {}  # the last line of each rank
    while block := os.read(source.fileno(), 65536):
        *pieces, pending = re.split(rb"(?<=[\r\n])", pending + block)
        for piece in pieces:
            match = PREFIX.match(piece)
            if not match and (own_traceback or piece.startswith(b"Traceback (most")):
                own_traceback += piece
                continue
            target.write(plain(piece))
            if match and (text := piece[match.end() :].strip()):
                said[match.group(1)] = text
                cause = cause or CAUSE.search(text)
        target.flush()
    target.write(plain(pending))
    target.flush()
    failed = FAILED_RANK.search(own_traceback)
    if failed is None:
        last.append(own_traceback)
    elif failed.group(2).decode() != str(INTERRUPTED):
        rank, code = failed.groups()
        reason = said.get(rank, b"it said nothing")
        told = cause.groups() if cause else (rank, b"with exit code %b: %b" % (code, reason))
        last.append(b"error: rank %b failed first: %b\n" % told)


def training_processes(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The ranks among the descendants of horovodrun: they know their number by HOROVOD_RANK."""
    ranks = []
    try:
        descendants = psutil.Process(launcher.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    for process in descendants:
        try:
            if "HOROVOD_RANK" in process.environ():
                ranks.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile
    return ranks


def interrupt(launcher: subprocess.Popen[bytes]) -> None:
    """Asks the ranks to end (as Ctrl-C does one process), and ends the job when they did not in time."""
    ranks = training_processes(launcher)
    if ranks:
        print(f"\ninterrupted: the ranks have {GRACE_S:.0f} s to end by themselves", file=sys.stderr)
    for process in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + (GRACE_S if ranks else 0.0)
    while launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    if launcher.poll() is None:
        launcher.terminate()  # horovodrun then kills the ranks


def run(command: list[str]) -> int:
    """Runs horovodrun; returns its exit code, INTERRUPTED after Ctrl-C."""
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    # TensorFlow's C++ log fills a page per process with notices about GPUs before anything happens. Errors of the
    # job come as Python exceptions all the same; the variable, when set, stays as it is.
    launcher = subprocess.Popen(
        command,
        cwd=ROOT,
        env={LOG_LEVEL: "3", **os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # out of reach of the terminal's Ctrl-C
    )
    if launcher.stdout is None or launcher.stderr is None:
        raise RuntimeError("Popen gave no pipes")
    last: list[bytes] = []
    streams = [(launcher.stdout, sys.stdout.buffer, last), (launcher.stderr, sys.stderr.buffer, last)]
    readers = [threading.Thread(target=forward, args=one, daemon=True) for one in streams]
    for reader in readers:
        reader.start()
    interrupted = False
    while True:
        try:
            code = launcher.wait()
            break
        except KeyboardInterrupt:
            if interrupted:  # a second Ctrl-C: at once
                launcher.terminate()
            else:
                interrupted = True
                interrupt(launcher)
    for reader in readers:
        reader.join()
    sys.stderr.buffer.write(b"".join(last))
    sys.stderr.flush()
    return INTERRUPTED if interrupted else code


def main() -> int:
    parser = argparse.ArgumentParser(prog="make train", description=__doc__)
    parser.add_argument("--np", type=int, required=True, help="number of processes")
    parser.add_argument("--data", required=True, help='folder of a data set, "" for synthetic data')
    parser.add_argument("--config", required=True, help='experiment file, "" to choose by the data')
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        config = choose_config(arguments.data, arguments.config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    command = horovodrun_command(arguments.np, arguments.data, config)
    print(f"train: {arguments.np} processes, {config} ...", flush=True)
    return run(command)


if __name__ == "__main__":
    sys.exit(main())
