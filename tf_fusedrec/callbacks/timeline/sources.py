"""Reads events from Horovod's timeline (exchanges) and from TensorFlow's profiler (ops)."""

from __future__ import annotations

import json
import pathlib
import re
import time

from tf_fusedrec._tf_compat import XSpace
from tf_fusedrec.callbacks.timeline.intervals import COMPUTE, EXCHANGE, TABLE, WAIT, Event

CLOCK = "fusedrec.clock"  # name of a profiler event at a known time

_OP = re.compile(r"^[^:]+:([A-Za-z_][\w>]*)$")  # "scope/name:Type"
# These ops only start other ops or wait for them. The other ops have their own events.
_NO_WORK = re.compile(
    r"^(Horovod.*|(Stateful)?PartitionedCall|(Stateless)?(If|While|Case)|_?IteratorGetNext.*|Queue.*)$"
)


def horovod_events(path: pathlib.Path, timeout_s: float = 10.0) -> list[Event]:
    """Exchanges in a stopped timeline, and their waits for other ranks.

    Args:
      path: Path of the timeline.
      timeout_s: Seconds to wait for the file, which Horovod writes in the background.

    Raises:
      TimeoutError: Horovod did not finish the file in time.
    """
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
            break
        except (FileNotFoundError, json.JSONDecodeError):
            if time.monotonic() > give_up:
                raise TimeoutError(f"Horovod did not finish {path} within {timeout_s} s.") from None
            time.sleep(0.05)
    epoch = next(e["args"]["start_time_since_epoch_in_micros"] for e in entries if "start_time" in str(e.get("args")))
    names: dict[int, str] = {}
    open_: dict[int, list[tuple[str, float]]] = {}
    events = []
    for entry in entries:
        if entry["ph"] == "M" and "name" in entry.get("args", {}):
            names[entry["pid"]] = entry["args"]["name"]
        elif entry["ph"] == "B":
            open_.setdefault(entry["pid"], []).append((entry["name"], entry["ts"]))
        elif entry["ph"] == "E" and open_.get(entry["pid"]):
            phase, begin = open_[entry["pid"]].pop()
            if open_[entry["pid"]]:  # Nested phases belong to the outer one.
                continue
            kind = WAIT if phase.startswith("NEGOTIATE_") else EXCHANGE
            name = f"{phase.removeprefix('NEGOTIATE_').lower()} {names[entry['pid']].rsplit('/', 1)[-1]}"
            events.append(Event(kind, name, 1e-6 * (epoch + begin), 1e-6 * (epoch + entry["ts"]), "horovod"))
    return events


def profiler_events(folder: pathlib.Path, clock_s: float) -> list[Event]:
    """Ops of the newest profile in a folder.

    Args:
      folder: Folder of the profiler.
      clock_s: Time of the event CLOCK, in seconds since the Unix epoch.
    """
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    space = XSpace()
    space.ParseFromString(newest.read_bytes())
    found: list[tuple[str, float, float, str]] = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                begin = 1e-9 * line.timestamp_ns + 1e-12 * event.offset_ps
                found.append(
                    (plane.event_metadata[event.metadata_id].name, begin, 1e-12 * event.duration_ps, line.name)
                )
    shift = clock_s - next(begin for name, begin, _, _ in found if name == CLOCK)
    events = []
    for name, begin, duration, thread in found:
        op = _OP.match(name)
        if op and not _NO_WORK.match(op[1]):
            kind = TABLE if op[1].startswith("Fusedrec>Table") else COMPUTE
            events.append(Event(kind, name, begin + shift, begin + shift + duration, thread))
    return events
