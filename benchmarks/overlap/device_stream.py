"""An accelerator that is not there: a dense layer and a memory that take time and no core (device_stream.cc).

    hidden = layer(rows, weight, seconds)       on the stream DEVICE, forward; its gradient backward
    ids = wait(ids, seconds, MEMORY)            on a stream of its own

An op on a stream begins when its inputs exist and the op before it on the stream has ended. No core works while it
runs. `stamping` records the begin and the end of every collective that is traced inside. `take_record` returns all
spans, on the monotonic clock. The ops are compiled at first use, into build/benchmarks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any
from unittest import mock

from benchmarks.harness import harness
from tf_fusedrec import ops, tf

SOURCE = pathlib.Path(__file__).with_name("device_stream.cc")
BUILD = harness.ROOT / "build/benchmarks"
DEVICE, MEMORY = "device", "memory"  # names of streams

Span = tuple[float, float]  # begin and end, in seconds of time.monotonic()


def compiled() -> pathlib.Path:
    """Returns the library of the ops. Compiles it if its source or its command has changed.

    Raises:
      CheckFailed: The compiler is missing or failed.
    """
    headers = [f"-isystem{flag[2:]}" if flag.startswith("-I") else flag for flag in tf.sysconfig.get_compile_flags()]
    flags = ["-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-shared"]  # the relevant flags of setup.py
    command = [os.environ.get("CXX", "g++"), *headers, *flags, str(SOURCE), *tf.sysconfig.get_link_flags()]
    key = hashlib.sha256(SOURCE.read_bytes() + shlex.join(command).encode()).hexdigest()[:16]
    library = BUILD / f"device_stream-{key}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}.tmp")
        try:
            subprocess.run(
                [*command, "-o", str(unfinished)], check=True, capture_output=True, encoding="utf-8", errors="replace"
            )
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or error
            raise harness.CheckFailed(f"{SOURCE.name} does not compile. Install g++ or set CXX.\n{reason}") from error
        unfinished.replace(library)  # at once, because other ranks may wait for the file
    return library


@functools.cache
def _ops() -> Any:
    return tf.load_op_library(str(compiled()))


def layer(rows: tf.Tensor, weight: tf.Tensor, seconds: tf.Tensor) -> tf.Tensor:
    """A dense layer on the stream DEVICE: hidden[i] = sum(rows[i]) / sqrt(D) + mean(weight).

    Args:
      rows: <float>[n, D].
      weight: <float>[P], P >= 1.
      seconds: <double>[2], time of the forward and of the backward pass.

    Returns:
      <float>[n]. Gradients flow to rows and weight, when the backward pass has had its turn on the stream.
    """
    return _ops().fusedrec_bench_device_forward(rows=rows, weight=weight, seconds=seconds)


@tf.RegisterGradient("FusedrecBench>DeviceForward")
def _layer_grad(op: tf.Operation, grad: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, None]:
    rows, weight, seconds = op.inputs
    return *_ops().fusedrec_bench_device_backward(grad=grad, rows=rows, weight=weight, seconds=seconds), None


@tf.RegisterGradient("FusedrecBench>Stamp")
def _stamp_grad(_: tf.Operation, grad: tf.Tensor) -> tf.Tensor:
    return grad


def wait(value: tf.Tensor, seconds: tf.Tensor, stream: str) -> tf.Tensor:
    """Hands a tensor on after its turn of `seconds` <double>[] on a stream; at once where they are 0."""
    return _ops().fusedrec_bench_delay(value=value, seconds=seconds, stream=stream)


@contextlib.contextmanager
def stamping() -> Iterator[None]:
    """Lets collectives traced inside record their spans: from the time when this rank asks until the data are here."""
    marked = ops.mark_collective

    def stamped(value: tf.Tensor, *, name: str, ended: bool) -> tf.Tensor:
        # The innermost times: behind the mark of the begin, and before the mark of the end.
        if ended:
            return marked(_ops().fusedrec_bench_stamp(value=value, event=name, ended=True), name=name, ended=True)
        return _ops().fusedrec_bench_stamp(value=marked(value, name=name, ended=False), event=name, ended=False)

    with mock.patch.object(ops, "mark_collective", stamped):
        yield


def take_record() -> dict[str, list[Span]]:
    """Returns the spans of each stream and collective since the last call, by name and in order. Eager.

    A span whose begin or end lies in another record is left out.
    """
    names, ended, at = (tensor.numpy() for tensor in _ops().fusedrec_bench_take_record())
    begun: dict[str, list[float]] = {}
    spans: dict[str, list[Span]] = {}
    for name, is_end, time in zip(names, ended, at):
        if not is_end:
            begun.setdefault(name.decode(), []).append(float(time))
        elif begun.get(name.decode()):
            spans.setdefault(name.decode(), []).append((begun[name.decode()].pop(0), float(time)))
    return spans
