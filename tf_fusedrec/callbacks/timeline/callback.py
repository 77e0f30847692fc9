"""The callback that records steps and writes trace, step times and picture."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from tf_fusedrec._tf_compat import keras
from tf_fusedrec.callbacks.timeline import picture
from tf_fusedrec.callbacks.timeline.intervals import Event, StepTimes, step_times
from tf_fusedrec.callbacks.timeline.recorder import Recorder
from tf_fusedrec.exchange import collectives, horovod_timeline


class Timeline(keras.callbacks.Callback):
    """Records some steps of `fit`: the times of each exchange and op, and the exposed communication.

    Rank 0 records itself only, like Horovod's timeline. All ranks or only rank 0 may fit with the callback. After the
    last recorded step the folder holds three files:

      trace.json  all events, for chrome://tracing or ui.perfetto.dev
      step.png    picture of the median step
      steps.json  times of each step, which `steps` holds too

    Recording slows a step by a few microseconds per op. With several ranks, call tf_fusedrec.init(timeline=True).

    Args:
      folder: Folder to make.
      first_step: First step to record, >= 1, counted from 0 at the start of training; early steps trace the graph.
      steps: Number of steps to record, >= 1.

    Raises:
      ValueError: first_step or steps is too small; the model has steps_per_execution > 1, where single steps have no
        end.
      RuntimeError: several processes joined without tf_fusedrec.init(timeline=True); Horovod already writes its own
        timeline (horovodrun --timeline-filename).
    """

    def __init__(self, folder: str | os.PathLike, first_step: int = 5, steps: int = 3):
        super().__init__()
        if first_step < 1 or steps < 1:
            raise ValueError(f"first_step and steps must be >= 1, got {first_step} and {steps}.")
        horovod_timeline.check_timeline()
        self.folder = pathlib.Path(folder)
        self.steps: list[StepTimes] = []
        self._first, self._last = first_step, first_step + steps - 1
        self._recorder: Recorder | None = None
        self._bounds: list[tuple[int, float, float]] = []

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if getattr(self.model, "_steps_per_execution", 1) != 1:
            raise ValueError(
                f"Timeline needs steps_per_execution=1, got {self.model._steps_per_execution}: a step must end before "
                "the next one begins. Compile the model with steps_per_execution=1."
            )
        self._step, self.steps, self._bounds = -1, [], []

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._step += 1
        if collectives.rank() == 0:
            if self._step == self._first:
                self._recorder = Recorder()
            self._begin = time.time()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._recorder is not None:
            self._bounds.append((self._step, self._begin, time.time()))
            if self._step == self._last:
                self._stop()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._recorder is not None:  # Training ended before the last step to record.
            self._stop()

    def _stop(self) -> None:
        assert self._recorder is not None
        events = self._recorder.stop()
        self._recorder = None
        self.steps = [step_times(number, events, begin, end) for number, begin, end in self._bounds]
        self._write(events)

    def _write(self, events: list[Event]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        begin, end = self._bounds[0][1], self._bounds[-1][2]
        recorded = [event for event in events if event.end > begin and event.begin < end]
        (self.folder / "trace.json").write_text(json.dumps(_chrome_trace(recorded, self._bounds)), encoding="utf-8")
        (self.folder / "steps.json").write_text(
            json.dumps([times._asdict() for times in self.steps], indent=1) + "\n", encoding="utf-8"
        )
        median = sorted(range(len(self.steps)), key=lambda i: self.steps[i].step_ms)[len(self.steps) // 2]
        picture.draw(self.folder / "step.png", self.steps[median], events, *self._bounds[median][1:])


def _chrome_trace(events: list[Event], bounds: list[tuple[int, float, float]]) -> dict[str, Any]:
    """Events in the Trace Event Format, in microseconds: a process per kind of event, a thread per thread."""
    zero = bounds[0][1]
    kinds = ["step", *sorted({event.kind for event in events})]
    threads = {thread: i for i, thread in enumerate(dict.fromkeys(event.thread for event in events))}
    entries: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": kind}} for pid, kind in enumerate(kinds)
    ]
    steps = [Event("step", f"step {number}", begin, end, "") for number, begin, end in bounds]
    for event in [*steps, *events]:
        entries.append(
            {
                "ph": "X",
                "name": event.name,
                "pid": kinds.index(event.kind),
                "tid": threads.get(event.thread, 0),
                "ts": 1e6 * (event.begin - zero),
                "dur": 1e6 * (event.end - event.begin),
            }
        )
    return {"traceEvents": entries, "displayTimeUnit": "ms"}
