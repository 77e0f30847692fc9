"""The output folder of a job, which one job at a time may write.

Two jobs in one folder would remove each other's unfinished saves, and leave a checkpoint of one beside the export of
the other.
"""

from __future__ import annotations

import fcntl
import pathlib
from typing import IO

import tf_fusedrec as fr

LOCK = "job.lock"


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
