"""The times at which the stages of a training step end, by clocks inside its graph.

An op that reads the clock follows every op of this project and every all-to-all of a traced step. The time between two
marks belongs to the stage that ends with the later mark, so that stages add up to the step. Where stages overlap, the
later one counts only the time that it adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tensorflow.python.framework.auto_control_deps import AutomaticControlDependencies

from tf_fusedrec import tf
from tf_fusedrec.exchange.collectives import ALL_TO_ALLS

_STAGES = {
    "Fusedrec>FuseIds": "fuse ids",
    "Fusedrec>SegmentUnique": "deduplicate ids",
    "Fusedrec>RankPartition": "partition by owner",
    "Fusedrec>TableLookup": "table: lookup",
    "Fusedrec>Recover": "rows in the order of ids",
    "Fusedrec>PooledRecover": "rows in the order of ids",
    "Fusedrec>RecoverGrad": "sum gradients by id",
    "Fusedrec>PooledRecoverGrad": "sum gradients by id",
    "Fusedrec>TableApplyGradients": "table: update",
}
_EXCHANGES = ("ids", "rows", "gradients")  # in the order of a step
DENSE = "dense part, forward and backward"
BEFORE = "call"
REST = "rest of the step"


class MarkedStep:
    """A step that records the end of each of its stages.

    Args:
      step: The step as a Python function, without tf.function around it.
    """

    def __init__(self, step: Callable[..., Any]):
        self._step = step
        self._names: list[str] = []
        self._function: Callable[..., Any] | None = None

    def _marked(self, *arguments: Any) -> tuple[Any, tf.Tensor]:
        begin = tf.timestamp()
        with tf.control_dependencies([begin]):
            arguments = tf.nest.map_structure(tf.identity, arguments, expand_composites=True)
        # A tf.function would order the clocks, which are stateful ops, behind the step's last stateful op: a circle.
        with AutomaticControlDependencies() as dependencies:
            result = dependencies.mark_as_return(self._step(*arguments))
        names, marks, exchanges = [BEFORE], [begin], 0
        for op in tf.compat.v1.get_default_graph().get_operations():
            name = _STAGES.get(op.type)
            if op.type in ALL_TO_ALLS:
                name = f"all-to-all of {_EXCHANGES[exchanges % len(_EXCHANGES)]}"
                exchanges += 1
            if name == _STAGES["Fusedrec>RecoverGrad"]:  # the arrival of its gradients ends the dense part
                names.append(DENSE)
                marks.append(_clock_after(op.inputs[0].op))
            if name is not None:
                names.append(name)
                marks.append(_clock_after(op))
        self._names = names
        return result, tf.stack(marks)

    def run(self, *arguments: Any) -> dict[str, list[float]]:
        """Runs a step. Returns the seconds from the call to the marks of each stage, and to the return (REST)."""
        if self._function is None:
            signature = [tf.TensorSpec.from_tensor(tensor) for tensor in tf.nest.flatten(arguments)]
            self._function = tf.compat.v1.wrap_function(
                lambda *flat: self._marked(*tf.nest.pack_sequence_as(arguments, flat)), signature
            )
        begin = time.time()
        _, marks = self._function(*tf.nest.flatten(arguments))
        end = time.time()
        done: dict[str, list[float]] = {}
        for name, mark in zip(self._names, marks.numpy()):
            done.setdefault(name, []).append(float(mark) - begin)
        return {**done, REST: [end - begin]}


def _clock_after(op: tf.Operation) -> tf.Tensor:
    """Reads the clock after `op`. The consumers of `op` wait for that, as a single thread may else read it late."""
    consumers = {consumer.name: consumer for output in op.outputs for consumer in output.consumers()}
    with tf.control_dependencies([op]):
        clock = tf.timestamp()
    for consumer in consumers.values():
        consumer._add_control_input(clock.op)
    return clock


def stage_ms(runs: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """Returns the milliseconds that each stage adds to the step, in the order of their ends, from medians over runs.

    The time of a stage with several marks, one for each group of tables, is the sum over its marks.
    """
    ends = sorted(
        (float(np.median([run[name][i] for run in runs])), name) for name in runs[0] for i in range(len(runs[0][name]))
    )
    added: dict[str, float] = {}
    before = 0.0
    for end, name in ends:
        added[name] = added.get(name, 0.0) + 1e3 * (end - before)
        before = end
    return added
