"""Starts and stops Horovod's timeline and TensorFlow's profiler, and merges their events."""

from __future__ import annotations

import pathlib
import tempfile
import time

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.callbacks.timeline.intervals import Event
from tf_fusedrec.callbacks.timeline.sources import CLOCK, horovod_events, profiler_events
from tf_fusedrec.exchange import collectives, horovod_timeline

_MARGIN_S = 0.1  # Horovod's thread starts and stops a timeline between two of its cycles.


class Recorder:
    """Records this process from construction to `stop`. Only one may run, on rank 0, which Horovod's timeline covers.

    Raises:
      RuntimeError: see horovod_timeline.check_timeline.
    """

    def __init__(self) -> None:
        self._logs = tempfile.TemporaryDirectory()
        self._folder = pathlib.Path(self._logs.name)
        horovod_timeline.start_timeline(self._folder / "horovod.json")
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
        tf.profiler.experimental.start(str(self._folder), options)
        with tf.profiler.experimental.Trace(CLOCK):
            self._clock = time.time()
        time.sleep(_MARGIN_S)

    def stop(self) -> list[Event]:
        """Stops recording. Returns all events, on the clock of time.time()."""
        tf.profiler.experimental.stop()
        events = profiler_events(self._folder, self._clock)
        if collectives.size() > 1:
            time.sleep(_MARGIN_S)
            horovod_timeline.stop_timeline()
            events += horovod_events(self._folder / "horovod.json")
        self._logs.cleanup()
        return events
