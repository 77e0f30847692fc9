"""The output folder of a job, which one job at a time may write, and run.json in it: what ran, on which data, and how.

    runs/NAME/2026-11-25_2342/     a folder for each run, by its start; runs/NAME/latest links to the newest
        run.json                   RunRecord
        checkpoint/ saved_model/ tensorboard/ samples.npz

Two jobs in one folder would remove each other's unfinished saves, and leave a checkpoint of one beside the export of
the other. The module needs no TensorFlow, so that a list of runs appears at once.
"""

from __future__ import annotations

import datetime
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, Any

import tf_fusedrec as fr
from tf_fusedrec.files import manifest

RUNS = pathlib.Path("runs")
RECORD = "run.json"
LOCK = "job.lock"
LATEST = "latest"
_PACKAGES = ("tf_fusedrec", "tensorflow", "keras", "tf_keras", "horovod", "numpy", "pyarrow")


def claim(output: pathlib.Path) -> IO[str] | None:
    """Makes the output folder and claims it until this process ends or closes the returned file. Collective.

    Rank 0 holds the claim. A file system without locks lets every job in.

    Raises:
      ValueError: another job writes there, or rank 0 cannot write there; raised on all ranks.
    """
    file, message = None, None
    if fr.rank() == 0:
        try:
            output.mkdir(parents=True, exist_ok=True)
            file = (output / LOCK).open("w", encoding="utf-8")
        except OSError as error:
            message = f"--output {str(output)!r} cannot be written: {error}. Pass another --output."
        else:
            message = _lock(file, output)
    message = fr.collectives.all_gather_object(message)[0]
    if message is not None:
        raise ValueError(message)
    return file


def _lock(file: IO[str], output: pathlib.Path) -> str | None:
    """Locks the file. Returns a message if another job has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"another job writes to {str(output)!r}. Wait for its end, or pass another --output."
    except OSError:
        return None  # The file system has no locks.
    return None


def new_folder(name: str, root: pathlib.Path = RUNS) -> pathlib.Path:
    """Makes and returns root/NAME/<minute>, to which root/NAME/latest links.

    Raises:
      ValueError: This process cannot write there.
    """
    parent, number = root / name, 1
    minute = datetime.datetime.now().strftime("%Y-%m-%d_%H%M")
    folder = parent / minute
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
                break
            except FileExistsError:
                number += 1
                folder = parent / f"{minute}_{number}"
        link = parent / f".{folder.name}.link"
        link.symlink_to(folder.name)
        link.replace(parent / LATEST)
    except OSError as error:
        raise ValueError(f"{str(parent)!r} cannot be written: {error}. Pass another --output.") from error
    return folder


def run_of(path: str | os.PathLike) -> pathlib.Path:
    """Returns the folder of a run: `path`, or the newest run of a name.

    Raises:
      ValueError: There is no run.
    """
    for folder in (pathlib.Path(path), pathlib.Path(path) / LATEST):
        if (folder / RECORD).is_file():
            return folder.parent / os.readlink(folder) if folder.is_symlink() else folder
    state = f"has no {RECORD}" if pathlib.Path(path).is_dir() else "is no folder"
    raise ValueError(f"{os.fspath(path)!r} {state}. Pass a folder of `fusedrec train`; `fusedrec runs` lists them.")


def checkpoint_of(path: pathlib.Path) -> pathlib.Path | None:
    """The checkpoint of a checkpoint's folder, of a run, or of the newest run of a name."""
    folders = (path, path / "checkpoint", path / "latest/checkpoint")
    return next((folder for folder in folders if manifest.exists(folder)), None)


def runs(root: pathlib.Path = RUNS) -> dict[pathlib.Path, dict[str, Any]]:
    """Returns the records of all runs one or two levels below `root` by folder, newest first.

    Raises:
      ValueError: A run.json is damaged.
    """
    folders = [path.parent for level in ("*", "*/*") for path in root.glob(f"{level}/{RECORD}")]
    records = {folder: read_record(folder) for folder in folders if not folder.is_symlink()}
    return dict(sorted(records.items(), key=lambda run: run[1]["started"], reverse=True))


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the record of a run. The state of a run whose process has vanished is "killed".

    Raises:
      ValueError: run.json is damaged.
    """
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        state = record["state"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}. Remove the file to leave the run out.") from error
    return {**record, "state": "killed"} if state == "running" and not _is_claimed(folder) else record


def _is_claimed(folder: pathlib.Path) -> bool:
    """Whether a job holds the claim. A run of another host or a file system without locks may count as claimed."""
    try:
        with (folder / LOCK).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


class RunRecord:
    """run.json of a run, which rank 0 rewrites as the run goes. The file is whole at every moment.

    Args:
      folder: Output folder of the run.
      resumed: Whether the run goes on in a folder that has a record: its epochs and its seconds stay.

    Attributes:
      fields: The contents of run.json, on every rank; see `update`.
    """

    def __init__(self, folder: pathlib.Path, resumed: bool = False):
        self.folder = folder
        earlier = read_record(folder) if resumed and (folder / RECORD).is_file() else {}
        self._seconds = earlier.get("seconds", 0.0)
        self._begin = datetime.datetime.now(datetime.timezone.utc)
        begin = self._begin.isoformat(timespec="seconds")
        self.fields: dict[str, Any] = {
            "format": 1,
            "started": earlier.get("started", begin),
            "resumed": [*earlier.get("resumed", []), begin] if earlier else [],
            "epochs": earlier.get("epochs", []),
            "epochs_of_earlier_data": earlier.get("epochs_of_earlier_data", []),
            "steps": earlier.get("steps", {"step": [], "loss": []}),
        }

    def begin_new_data(self) -> None:
        """Puts the epochs so far aside, because the epochs of new data begin with the first one again."""
        self.fields["epochs_of_earlier_data"].append(self.fields["epochs"])
        self.fields["epochs"] = []

    def update(self, **fields: Any) -> None:
        """Replaces JSON-serializable fields and, on rank 0, writes the file."""
        now = datetime.datetime.now(datetime.timezone.utc)
        self.fields |= fields
        self.fields["seconds"] = round(self._seconds + (now - self._begin).total_seconds(), 1)
        if fr.rank() == 0:
            partial = self.folder / f"{RECORD}.new"
            try:
                partial.write_text(json.dumps(self.fields, indent=1) + "\n", encoding="utf-8")
            except OSError as error:  # of a full disk names no file
                raise OSError(error.errno, error.strerror, str(partial)) from None
            partial.replace(self.folder / RECORD)


def circumstances() -> dict[str, Any]:
    """Returns command, code, versions, ranks and hosts of this process, as fields of a record. Collective."""
    return {
        "command": shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "folder_of_command": os.getcwd(),
        "code": _git_state(),
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "ranks": fr.size(),
        "exchange": fr.collectives.exchange_name(),
        "hosts": fr.collectives.all_gather_object(socket.gethostname()),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _git_state() -> dict[str, Any]:
    """Returns the commit of the folder in which the job runs and the number of changed files; {} outside of git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, encoding="utf-8", timeout=10, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
        return {"commit": git("rev-parse", "HEAD"), "changed_files": len(changed)}
    except (OSError, subprocess.SubprocessError):
        return {}
