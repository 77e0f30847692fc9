"""Joins requests that arrive together into one call of a signature, and cuts its outputs apart.

Inputs are concatenated along their first dimension. `row_splits` inputs, which count the values before each row, are
moved on by the values of earlier requests. How the sizes of inputs and outputs belong together is learned: sizes that
were equal in every answered request count as one (EqualSizes). A request joins others only if it has these equalities.
So the first requests are answered alone, and so is every request of a signature whose outputs follow no input.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tf_fusedrec.models.serve.loaded import Signature

Arrays = dict[str, np.ndarray]
Sizes = dict[str, int]
_OUTPUT = "output "  # prefix of an output's size


class EqualSizes:
    """Which sizes were equal in every answered request.

    A size of a joined request is the sum of the sizes of its parts. A signature's demands on its inputs, such as splits
    that end at the number of values, are equalities of sizes. A learned equality holds for the parts, too.
    """

    def __init__(self) -> None:
        self._class_of: dict[str, int] = {}

    def learn(self, inputs: Sizes, outputs: Arrays) -> None:
        """Takes the sizes of a call that was answered."""
        of_outputs = {_OUTPUT + name: len(value) if value.ndim else -1 for name, value in outputs.items()}
        sizes = {**inputs, **of_outputs}
        parts = {name: (self._class_of.get(name), size) for name, size in sizes.items()}
        numbers = {part: number for number, part in enumerate(dict.fromkeys(parts.values()))}
        self._class_of = {name: numbers[part] for name, part in parts.items()}

    def allow(self, inputs: Sizes) -> bool:
        """Returns whether a request with these sizes may join others."""
        if not self._class_of:
            return False
        classes = self._sizes_of_classes(inputs)
        return set(self._class_of.values()) == set(classes) and all(
            size == classes[self._class_of[name]] for name, size in inputs.items()
        )

    def of_output(self, name: str, inputs: Sizes) -> int:
        """Returns the size of an output for the request with these sizes, -1 if it follows no input."""
        return self._sizes_of_classes(inputs).get(self._class_of[_OUTPUT + name], -1)

    def _sizes_of_classes(self, inputs: Sizes) -> dict[int, int]:
        return {self._class_of[name]: size for name, size in inputs.items()}


def is_joinable(signature: Signature) -> bool:
    """Returns whether requests of a signature can be concatenated: each tensor input has a free first dimension.

    Outputs with row_splits have sizes of their own, so they are not cut.
    """
    shapes = [spec.shape for spec in signature.inputs.values()]
    free = all(shape is not None and (not shape or shape[0] is None) for shape in shapes)
    return free and any(shapes) and not any(_is_splits(name) for name in signature.outputs)


def sizes_of(inputs: Mapping[str, np.ndarray]) -> Sizes | None:
    """Returns the sizes that add up when requests are joined, or None for splits that do not begin at 0."""
    sizes = {}
    for name, value in inputs.items():
        if _is_splits(name):
            if len(value) == 0 or value[0] != 0:
                return None
            sizes[name], sizes[f"{name} end"] = len(value) - 1, int(value[-1])
        elif value.ndim:
            sizes[name] = len(value)
            if name.endswith("_count"):
                sizes[f"{name} sum"] = int(value.sum())
    return sizes


def join(requests: Sequence[Arrays]) -> Arrays:
    """Returns the inputs of one call for all requests, which have equal scalars."""
    joined = {}
    for name, first in requests[0].items():
        parts = [request[name] for request in requests]
        if _is_splits(name):
            ends = np.cumsum([part[-1] for part in parts])
            moved = [part[1:] + end for part, end in zip(parts[1:], ends)]
            joined[name] = np.concatenate([first, *moved])
        else:
            joined[name] = np.concatenate(parts) if first.ndim else first
    return joined


class _Waiting(NamedTuple):
    inputs: Arrays
    sizes: Sizes
    answer: asyncio.Future[Arrays]


class Batcher:
    """Answers the requests of one signature. All methods run in the event loop; calls run in threads.

    Args:
      call: Function of inputs by name; returns outputs by name, or raises RequestError.
      signature: Inputs and outputs.
      threads: Executor of the calls.
      requests: Most requests of a call. 1: none are joined.
      seconds: How long a request waits for others.
      observe: Is told the number of requests of every call.
    """

    def __init__(
        self,
        call: Callable[[Arrays], Arrays],
        signature: Signature,
        threads: concurrent.futures.Executor,
        requests: int,
        seconds: float,
        observe: Callable[[int], None],
    ):
        self._call, self._threads, self._observe = call, threads, observe
        self._requests, self._seconds = requests, seconds
        self._joinable = requests > 1 and is_joinable(signature)
        self._equal = EqualSizes()
        self._groups: dict[Hashable, list[_Waiting]] = {}
        self._running: set[asyncio.Task[None]] = set()  # A loop holds its tasks by weak references only.

    async def answer(self, inputs: Arrays) -> Arrays:
        """Returns the outputs for these inputs, from a call of their own or together with others.

        Raises:
          RequestError: The call of these inputs alone raised it.
        """
        sizes = sizes_of(inputs) if self._joinable else None
        if sizes is None or not self._equal.allow(sizes):
            return await self._alone(inputs, sizes)
        key = tuple((value.shape[1:], b"" if value.ndim else value.tobytes()) for value in inputs.values())
        loop = asyncio.get_running_loop()
        waiting = _Waiting(inputs, sizes, loop.create_future())
        group = self._groups.setdefault(key, [])
        group.append(waiting)
        if len(group) == 1:
            loop.call_later(self._seconds, self._start, key, group)
        if len(group) == self._requests:
            self._start(key, group)
        return await waiting.answer

    def _start(self, key: Hashable, group: list[_Waiting]) -> None:
        """Starts the call of a group, unless it has begun."""
        if self._groups.get(key) is group:
            del self._groups[key]
            task = asyncio.get_running_loop().create_task(self._run(group))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, group: list[_Waiting]) -> None:
        parts: Sequence[Arrays | BaseException] | None = await self._together(group) if len(group) > 1 else None
        if parts is None:  # One bad request must not fail the others.
            alone = (self._alone(one.inputs, one.sizes) for one in group)
            parts = await asyncio.gather(*alone, return_exceptions=True)
        for one, part in zip(group, parts):
            if isinstance(part, BaseException):
                one.answer.set_exception(part)
            else:
                one.answer.set_result(part)

    async def _together(self, group: list[_Waiting]) -> list[Arrays] | None:
        """Returns the outputs of each request, or None if the call fails or its outputs cannot be cut apart."""
        try:
            outputs = await self._run_call(join([one.inputs for one in group]), len(group))
        except Exception:  # Each request alone gets its own error, of whatever kind.
            return None
        self._equal.learn({name: sum(one.sizes[name] for one in group) for name in group[0].sizes}, outputs)
        parts: list[Arrays] = [{} for _ in group]
        for name, value in outputs.items():
            sizes = [self._equal.of_output(name, one.sizes) for one in group]
            if min(sizes) < 0:
                return None
            for part, rows in zip(parts, np.split(value, np.cumsum(sizes)[:-1])):
                part[name] = rows
        return parts

    async def _alone(self, inputs: Arrays, sizes: Sizes | None) -> Arrays:
        outputs = await self._run_call(inputs, 1)
        if sizes is not None:
            self._equal.learn(sizes, outputs)
        return outputs

    async def _run_call(self, inputs: Arrays, requests: int) -> Arrays:
        self._observe(requests)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, inputs)


def _is_splits(name: str) -> bool:
    return name == "row_splits" or name.endswith("_row_splits")
