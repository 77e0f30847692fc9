"""`make train`: chooses the experiment for the data, and runs models.train on several processes by horovodrun.

One process needs no Horovod, and starts without it.

horovodrun 0.28.1 always puts "[0]<stdout>:" before every line. This program shows the first process's output
unchanged, and puts "rank 1: " before each line of another process.

It passes Ctrl-C on to the training processes and gives them time to end. horovodrun alone would kill them.
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
from typing import IO

import psutil

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEFAULT_CONFIG = "configs/grm_tiny.yaml"
# Files that identify a data set, and the experiment for it.
CONFIG_FOR_FILES = {
    ("ratings.dat", "ratings.csv", "ratings.csv.gz", "u.data"): "configs/hstu_ml1m_tiny.yaml",
    ("log.csv", "log.csv.gz"): "configs/grm_kuairand.yaml",
}
GRACE_S = 60.0  # Seconds from Ctrl-C until the remaining processes are killed.
INTERRUPTED = 130  # Exit code of a rank and of this program after Ctrl-C.
ERROR = b"error: "  # begins a rank's message about wrong arguments or data
OF_A_SIGNAL = 128  # A shell adds the number of the signal that ended a process.
PREFIX = re.compile(rb"^\[(\d+)\]<std(?:out|err)>:")
FAILED_RANK = re.compile(rb"Process name: (\d+)\s+Exit code: (\d+)")
# Ranks print this line about the first failed rank (tf_fusedrec/exchange/job_end.py).
CAUSE = re.compile(rb"tf_fusedrec: rank (\d+)(?: failed first|: failed): (.+)")


def choose_config(data: str, config: str) -> str:
    """Returns the given experiment file, else the data set's, else the default.

    Args:
      data: Folder of a data set, or "" for the synthetic one.
      config: Experiment file, or "" to choose it by the data.

    Raises:
      ValueError: A path does not exist, or the data are of an unknown kind and `config` is "".
    """
    if data and not pathlib.Path(data).is_dir():
        raise ValueError(f"DATA must be the folder of a data set, got {data!r}, which is no folder.")
    if config:
        if not pathlib.Path(config).is_file():
            known = ", ".join(sorted(f"configs/{path.name}" for path in ROOT.glob("configs/*.yaml")))
            raise ValueError(f"CONFIG must be an experiment file, got {config!r}. Choose one of: {known}.")
        return config
    if not data:
        return DEFAULT_CONFIG
    for names, chosen in CONFIG_FOR_FILES.items():
        if any((pathlib.Path(data) / name).is_file() for name in names):
            return chosen
    wanted = "; ".join(" or ".join(names) for names in CONFIG_FOR_FILES)
    raise ValueError(
        f"DATA={data} holds none of the files that identify a data set ({wanted}). "
        "Name the experiment file as well: CONFIG=configs/<name>.yaml."
    )


def training_command(processes: int, data: str, config: str) -> list[str]:
    # With "=", because a name may begin with a dash.
    command = [
        sys.executable,
        "-m",
        "tf_fusedrec.models.train",
        f"--config={config}",
        *([f"--data={data}"] if data else []),
    ]
    if processes == 1:
        return command
    # horovodrun lies beside this interpreter. Its cache in the home folder is for checks of remote hosts only.
    launcher = pathlib.Path(sys.executable).parent / "horovodrun"
    return [str(launcher), "-np", str(processes), "--gloo", "--disable-cache", *command]


def forward(source: IO[bytes], target: IO[bytes], last: list[bytes]) -> None:
    """Copies horovodrun's output line by line until it ends.

    After a rank's failure, horovodrun ends with its own traceback, which would hide the rank's message above it. The
    first failed rank and its cause replace the traceback.

    Args:
      source: Output stream of horovodrun.
      target: Stream that gets the output.
      last: List that gets the lines to print below the output of all streams.
    """
    pending, own_traceback, cause = b"", b"", None
    last_lines: dict[bytes, bytes] = {}  # The last line of each rank.
    block = b"unread"
    while block:
        block = os.read(source.fileno(), 65536)
        *lines, pending = re.split(rb"(?<=[\r\n])", pending + block)
        for line in lines if block else [*lines, pending]:
            match = PREFIX.match(line)
            if match:
                rank, line = match[1], line[match.end() :]
                if text := line.strip():
                    last_lines[rank] = text
                    cause = cause or CAUSE.search(text)
                    line = line if rank == b"0" else b"rank " + rank + b": " + line
            elif own_traceback or line.startswith(b"Traceback (most"):
                own_traceback, line = own_traceback + line, b""
            target.write(line)
        target.flush()
    failed = FAILED_RANK.search(own_traceback)
    if failed is None:
        last.append(own_traceback)
    elif (code := int(failed[2])) != INTERRUPTED:
        rank, reason = failed[1], last_lines.get(failed[1], b"it printed nothing")
        if cause:
            rank, reason = cause.groups()
        elif code > OF_A_SIGNAL:
            reason = killed_by(code - OF_A_SIGNAL).encode()
        elif reason.startswith(ERROR):
            reason = reason.removeprefix(ERROR)
        else:
            reason = b"with exit code %d: %b" % (code, reason)
        last.append(b"error: rank %b failed first: %b\n" % (rank, reason))


def killed_by(number: int) -> str:
    """Returns words for the signal that ended a process."""
    names = {one.value: one.name for one in signal.Signals}
    why = ", as Linux does when memory runs out" if number == signal.SIGKILL else ""
    return f"it was ended by {names.get(number, f'signal {number}')}{why} (exit code {OF_A_SIGNAL + number})"


def interrupt(launcher: subprocess.Popen[bytes], processes: int) -> None:
    """Sends SIGINT to the ranks, as Ctrl-C does, and ends the job if they exceed GRACE_S.

    The ranks are horovodrun's descendants with HOROVOD_RANK in their environment, or the only process.
    """
    grace_s = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(launcher.pid)
        for one in [process] if processes == 1 else process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if processes == 1 or "HOROVOD_RANK" in one.environ():
                    one.send_signal(signal.SIGINT)
                    grace_s = GRACE_S
    if grace_s:
        print(f"\ninterrupted: the ranks have {grace_s:.0f} s to end by themselves", file=sys.stderr)
    try:
        launcher.wait(grace_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        launcher.terminate()  # horovodrun then kills the ranks.


def run(command: list[str], processes: int = 1) -> int:
    """Runs the command of so many processes and returns its exit code, or INTERRUPTED after Ctrl-C."""
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    # TensorFlow's C++ log fills a page per process with notices about GPUs. Errors of the job still come as Python
    # exceptions. A value that the user set takes precedence.
    # With a thread per core in every process, TensorFlow's choice, the ranks' threads wake each other for tiny ops.
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    chosen = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": str(threads)}
    # A session of its own, because the terminal's Ctrl-C must not reach horovodrun.
    launcher = subprocess.Popen(
        command, cwd=ROOT, env={**chosen, **os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert launcher.stdout is not None and launcher.stderr is not None
    last: list[bytes] = []
    streams = [(launcher.stdout, sys.stdout.buffer, last), (launcher.stderr, sys.stderr.buffer, last)]
    readers = [threading.Thread(target=forward, args=one, daemon=True) for one in streams]
    waiting, interrupted = list(readers), False
    while True:
        try:
            while waiting:  # Ctrl-C may come while a thread starts, which must not start again.
                waiting.pop().start()
            code = launcher.wait()
            break
        except KeyboardInterrupt:
            if interrupted:  # A second Ctrl-C ends the job at once.
                launcher.terminate()
            else:
                interrupted = True
                interrupt(launcher, processes)
    for reader in readers:
        reader.join()
    if code < 0 and not interrupted:
        last.append(f"error: the process failed: {killed_by(-code)}\n".encode())
        code = OF_A_SIGNAL - code
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
    print(f"train: {arguments.np} process{'es' * (arguments.np > 1)}, {config} ...", flush=True)
    return run(training_command(arguments.np, arguments.data, config), arguments.np)


if __name__ == "__main__":
    sys.exit(main())
