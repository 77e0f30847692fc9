"""Horovod's timeline: rank 0 records when the collectives of a job wait and run."""

from __future__ import annotations

import os

from tf_fusedrec.exchange import collectives


def check_timeline() -> None:
    """Raises RuntimeError unless the processes joined with a timeline, or there is one process."""
    found = os.environ.get("HOROVOD_TIMELINE")
    if collectives.horovod() is None or found == "DYNAMIC":
        return
    if found is None:
        raise RuntimeError(
            "The processes have joined without a timeline, and later is too late. Remedy: tf_fusedrec.init("
            "timeline=True), or HOROVOD_TIMELINE=DYNAMIC in the environment of all processes."
        )
    raise RuntimeError(
        f"Horovod writes a timeline to {found!r} already. "
        "Remedy: leave out horovodrun --timeline-filename, or unset HOROVOD_TIMELINE."
    )


def start_timeline(path: os.PathLike | str) -> None:
    """Starts the record in a file of rank 0. Does nothing with one process.

    Raises:
      RuntimeError: As check_timeline.
    """
    check_timeline()
    if (horovod := collectives.horovod()) is not None:
        horovod.start_timeline(os.fspath(path))


def stop_timeline() -> None:
    """Ends the record. Horovod completes the file a little later."""
    if (horovod := collectives.horovod()) is not None:
        horovod.stop_timeline()
