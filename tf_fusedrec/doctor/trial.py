"""Trains ten steps on new processes, and names what went wrong with a remedy."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_fusedrec.doctor.ten_steps import STEPS

TIME_LIMIT_S = 300.0  # A step takes milliseconds; the start of TensorFlow on a busy machine may take a minute.
_TAIL_LINES = 12
_LAUNCH = "from horovod.runner.launch import run_commandline; run_commandline()"
# Two processes share the GPUs, and may share threads with others. Notices of TensorFlow would hide the error.
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true", "PYTHONUNBUFFERED": "1"}
# Words of an output without a remedy, with their remedy.
_REMEDIES = {
    "No module named 'horovod": "build Horovod again as docs/install.md says; this installation is not whole.",
    "support has not been built": "build Horovod with TensorFlow and Gloo, as docs/install.md says.",
    "undefined symbol": "build Horovod again: it was built for a different TensorFlow or compiler.",
    "Illegal instruction": "build the custom ops on this machine; name its processor in the report.",
    "out of memory": "end other programs that use the GPU or the memory.",
}
_NO_REMEDY = "none is known; report this with the whole output of the doctor."


class TrialFailed(Exception):
    """The processes did not train. The message has the reason and a remedy."""


def run(processes: int, time_limit_s: float = TIME_LIMIT_S) -> dict[str, Any]:
    """Returns the answer of ten_steps.train on new processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "answer.json"
        command = [sys.executable, "-m", "tf_fusedrec.doctor.ten_steps", str(path)]
        if processes > 1:
            launcher = [sys.executable, "-c", _LAUNCH, "-np", str(processes), "--gloo", "--disable-cache"]
            command = [*launcher, *command]
        output = run_program(command, time_limit_s)
        if not path.exists():
            raise TrialFailed(explain(output))
        answer = json.loads(path.read_text(encoding="utf-8"))
    losses = answer["losses"]
    if not (np.isfinite(losses).all() and losses[-1] < losses[0]):
        raise TrialFailed(f"the loss did not fall: {losses}.\n    Remedy: {_NO_REMEDY}")
    return answer


def check_equal(single: dict[str, Any], several: dict[str, Any]) -> None:
    """Raises TrialFailed unless several processes trained the same rows as one process."""
    ids = sorted(single["rows"])
    if ids != sorted(several["rows"]):
        reason = f"one process has {len(ids)} rows, several have {len(several['rows'])}, or rows of different ids"
    else:
        both = (np.array([answer["rows"][name] for name in ids]) for answer in (single, several))
        difference = float(np.abs(np.subtract(*both)).max())
        # Ten steps on float32 sums of 128 samples in a different order; numbers are of the order of 1.
        if difference < 1e-4:
            return
        reason = f"their rows differ from the rows of one process by up to {difference:.2g}"
    raise TrialFailed(f"{reason}.\n    Remedy: {_NO_REMEDY}")


def explain(output: str) -> str:
    """The last error with a remedy in a failed program's output, or the end of the output and a remedy."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    with_remedy = [line for line in lines if "Remedy: " in line or ". Use " in line]
    if with_remedy:
        return with_remedy[-1].strip()
    remedy = next((remedy for words, remedy in _REMEDIES.items() if words in output), _NO_REMEDY)
    shown = "".join(f"\n    | {line}" for line in lines[-_TAIL_LINES:])
    return f"the program ended without an answer. Its last lines:{shown}\n    Remedy: {remedy}"


def run_program(command: Sequence[str], time_limit_s: float) -> str:
    """The output of a command, which is killed with its children after time_limit_s."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
        errors="replace", env={**os.environ, **_ENVIRONMENT}, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=time_limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise TrialFailed(
            f"no answer to {STEPS} steps within {time_limit_s:.0f} s.\n    Remedy: end other programs on this machine, "
            "and let programs connect to this host's own addresses (the interface lo), then try again."
        ) from None
    if process.returncode < 0:
        return f"{output}\n{signal.strsignal(-process.returncode)}"
    return output
