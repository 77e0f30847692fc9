"""Timeline of training steps: a Chrome trace, a picture of exchanges and ops, and the exposed communication."""

from __future__ import annotations

import json
import math
import os
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.callbacks import timeline_events
from tf_fusedrec.callbacks.timeline_events import COMPUTE, EXCHANGE, TABLE, WAIT, Event, StepTimes
from tf_fusedrec.exchange import collectives, horovod

_CLOCK_READINGS = 16  # a busy machine may stop the thread in the middle of some
_MARGIN_S = 0.1  # Horovod's thread starts and stops a timeline between two of its cycles.
EXPOSED = "exposed"
# Lanes from the top: color and meaning.
LANES = {
    WAIT: ((190, 210, 230), "an exchange waits for a rank that has not requested it yet; ops may run"),
    EXCHANGE: ((31, 119, 180), "an exchange runs: all ranks have requested it, and data travel"),
    TABLE: ((44, 160, 44), "an op of an embedding table runs: lookup or update"),
    COMPUTE: ((255, 152, 60), "any other op runs"),
    EXPOSED: ((214, 39, 40), "an exchange runs and no op: communication that no computation hides"),
}
LEFT, WIDTH, LANE, TOP = 110, 1500, 46, 50  # pixels: left end and width of the time axis, height of a lane, first lane
BOTTOM = TOP + LANE * len(LANES)  # end of the lanes; the labels of the time axis and the legend follow
LINE, LEGEND = 22, BOTTOM + 44  # height of a line of the legend, and its top
_INK, _GRID, _GAP = (40, 40, 40), (225, 225, 225), "white"


class Timeline(keras.callbacks.Callback):
    """Records some steps of `fit`: the times of each exchange and op, and the exposed communication.

    Only rank 0 is recorded, as in Horovod's timeline. All ranks or only rank 0 may fit with the callback. After the
    last recorded step the folder has three files:

      trace.json  all events, for chrome://tracing or ui.perfetto.dev
      step.png    picture of the median step
      steps.json  times of each step, as in `steps`

    Recording slows a step by a few microseconds per op. With several ranks, call tf_fusedrec.init(timeline=True).

    Args:
      folder: Folder to create.
      first_step: First step to record, >= 1, counted from 0 at the start of training; early steps trace the graph.
      steps: Number of steps to record, >= 1.

    Raises:
      ValueError: first_step or steps is too small; the model has steps_per_execution > 1.
      RuntimeError: several processes joined without tf_fusedrec.init(timeline=True); Horovod already writes a timeline
        (horovodrun --timeline-filename).

    Examples:
      >>> timeline = fr.callbacks.Timeline("timeline", first_step=1, steps=1)
      >>> history = model.fit(x, y, batch_size=16, epochs=2, callbacks=[timeline], verbose=0)
      >>> timeline.steps[0].step_ms > 0
      True
    """

    def __init__(self, folder: str | os.PathLike, first_step: int = 5, steps: int = 3):
        super().__init__()
        if first_step < 1 or steps < 1:
            raise ValueError(f"first_step and steps must be >= 1, got {first_step} and {steps}.")
        horovod.check_timeline()
        self.folder = pathlib.Path(folder)
        self.steps: list[StepTimes] = []
        self._first, self._last = first_step, first_step + steps - 1
        self._logs: tempfile.TemporaryDirectory | None = None  # while it records
        self._bounds: list[tuple[int, float, float]] = []

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if getattr(self.model, "steps_per_execution", 1) != 1:
            raise ValueError(
                f"Timeline got a model with steps_per_execution={self.model.steps_per_execution}, but a step must end "
                "before the next one begins. Use steps_per_execution=1 in compile."
            )
        self._step, self.steps, self._bounds = -1, [], []

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._step += 1
        if collectives.rank() == 0:
            if self._step == self._first:
                self._start()
            self._begin = time.time()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._logs is not None:
            self._bounds.append((self._step, self._begin, time.time()))
            if self._step == self._last:
                self._stop()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._logs is not None:  # training ended before the last step to record
            self._stop()

    def _start(self) -> None:
        self._logs = tempfile.TemporaryDirectory()
        horovod.start_timeline(f"{self._logs.name}/horovod.json")
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
        tf.profiler.experimental.start(self._logs.name, options)
        self._clock = [_clock_reading() for _ in range(_CLOCK_READINGS)]
        time.sleep(_MARGIN_S)

    def _stop(self) -> None:
        """Stops recording and writes the files. Times of events are on the clock of time.time()."""
        assert self._logs is not None
        folder = pathlib.Path(self._logs.name)
        tf.profiler.experimental.stop()
        events = timeline_events.profiler_events(folder, self._clock)
        if collectives.size() > 1:
            time.sleep(_MARGIN_S)
            horovod.stop_timeline()
            events += timeline_events.horovod_events(folder / "horovod.json")
        self._logs.cleanup()
        self._logs = None
        self.steps = [timeline_events.step_times(number, events, begin, end) for number, begin, end in self._bounds]
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
        draw(self.folder / "step.png", self.steps[median], events, *self._bounds[median][1:])


def _clock_reading() -> tuple[float, float]:
    """Times just before and just after the begin of an event CLOCK."""
    before = time.time()
    with tf.profiler.experimental.Trace(timeline_events.CLOCK):
        return before, time.time()


def _chrome_trace(events: list[Event], bounds: list[tuple[int, float, float]]) -> dict[str, Any]:
    """Events in the Trace Event Format, in microseconds: a process per lane, a thread per thread."""
    zero = bounds[0][1]
    lanes = ["step", *sorted({event.lane for event in events})]
    threads = {thread: i for i, thread in enumerate(dict.fromkeys(event.thread for event in events))}
    entries: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": lane}} for pid, lane in enumerate(lanes)
    ]
    steps = [Event("step", f"step {number}", begin, end, "") for number, begin, end in bounds]
    for event in [*steps, *events]:
        entries.append(
            {
                "ph": "X",
                "name": event.name,
                "pid": lanes.index(event.lane),
                "tid": threads.get(event.thread, 0),
                "ts": 1e6 * (event.begin - zero),
                "dur": 1e6 * (event.end - event.begin),
            }
        )
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def draw(path: pathlib.Path, times: StepTimes, events: Sequence[Event], begin: float, end: float) -> None:
    """Writes a PNG of the step that ran from `begin` to `end`, in seconds."""
    shown = timeline_events.inside(events, begin, end)
    image = Image.new("RGB", (LEFT + WIDTH + 40, LEGEND + LINE * len(LANES) + 8), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(14)

    def x(moment: float) -> float:
        return LEFT + WIDTH * (moment - begin) / (end - begin)

    title = (
        f"step {times.number}: {times.step_ms:.1f} ms = {times.compute_ms:.1f} compute + {times.exposed_ms:.1f} exposed"
        f" communication + {times.free_ms:.1f} free; {times.exchange_ms:.1f} ms of exchanges"
    )
    pen.text((LEFT, 12), title, _INK, font)
    for tick in ticks(times.step_ms):
        at = x(begin + 1e-3 * tick)
        pen.line([at, TOP, at, BOTTOM], _GRID)
        pen.text((at, BOTTOM + 8), f"{tick:g}", _INK, font, anchor="ma")
    pen.text((12, BOTTOM + 8), "ms", _INK, font)
    for row, (lane, (color, meaning)) in enumerate(LANES.items()):
        top = TOP + LANE * row
        pen.text((12, top + 14), lane, _INK, font)
        if lane == EXPOSED:
            spans = [(x(start), x(stop), "") for start, stop in timeline_events.exposed(shown)]
        else:
            # A label is the end of a name, such as "0.rows" or "MatMul".
            labels = [".".join(e.name.rsplit(":", 1)[-1].rsplit(".", 2)[-2:]) for e in shown]
            spans = [(x(e.begin), x(e.end), label) for e, label in zip(shown, labels) if e.lane == lane]
        for start, stop, _ in spans:
            # White edges separate neighbors. Narrow bars have none, because the edge would hide them.
            edge = _GAP if lane in (WAIT, EXCHANGE) and stop - start > 4 else None
            pen.rectangle([start, top + 6, max(stop, start + 1), top + LANE - 6], fill=color, outline=edge)
        label_end = 0.0  # bars of one lane may overlap
        for start, stop, label in sorted(spans):
            width = pen.textlength(label, font)
            if label and start + 4 >= label_end and width < stop - start - 6:
                pen.text((start + 4, top + 14), label, _INK if lane == WAIT else "white", font)
                label_end = start + 4 + width
        line = LEGEND + LINE * row
        pen.rectangle([LEFT, line, LEFT + 14, line + 14], fill=color)
        pen.text((LEFT + 24, line), f"{lane}: {meaning}", _INK, font)
    image.save(path)


def ticks(step_ms: float) -> list[float]:
    """Round tick marks of a step in ms, from 0, with 6 to 13 ticks at 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step_ms / 6))
    every = next(power * factor for factor in (5, 2, 1) if 5 * power * factor <= step_ms)
    return [every * n for n in range(math.floor(step_ms / every) + 1)]
