"""When each exchange and each compute of a training step ran: a Chrome trace, a picture, and what was not hidden."""

from tf_fusedrec.callbacks.timeline.callback import Timeline
from tf_fusedrec.callbacks.timeline.intervals import StepTimes, step_times
from tf_fusedrec.callbacks.timeline.recorder import Recorder

__all__ = ["Recorder", "StepTimes", "Timeline", "step_times"]
