"""Timeline of training steps: a Chrome trace and a picture of exchanges and ops, and the exposed communication."""

from tf_fusedrec.callbacks.timeline.callback import Timeline
from tf_fusedrec.callbacks.timeline.intervals import StepTimes, step_times
from tf_fusedrec.callbacks.timeline.recorder import Recorder

__all__ = ["Recorder", "StepTimes", "Timeline", "step_times"]
