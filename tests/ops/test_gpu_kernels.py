"""Every op has a GPU kernel for the types of its CPU kernel, with sizes and splits on the host.

tests/cuda and tests/gpu test the results of these kernels.
"""

from __future__ import annotations

import pathlib
import re

import pytest

from tf_fusedrec.ops import _library

from tensorflow.python.framework import kernels, op_def_registry  # isort: skip  (tf_fusedrec first)

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Ops whose GPU kernel has all arguments in host memory and computes there, and the reason.
ON_THE_HOST = {
    "WindowUnique": "micro-batches share rows on several ranks only, and their ids are in host memory there",
    "WindowRoute": "as WindowUnique",
    "WindowGradients": "as WindowUnique",
    "PartialSums": "owners sum rows of tables in host memory only",
    "PartialSumTerms": "as PartialSums",
    "ClusterSamples": "it runs in the input pipeline, which is on the host",
    "UserStates": "the states of all users need host memory, and the model takes one request's states to the device",
    "UserStatesFind": "as UserStates",
    "UserStatesWrite": "as UserStates",
    "UserStatesDrop": "as UserStates",
    "UserStatesSpill": "as UserStates",
    "UserStatesStatistics": "as UserStates",
}
HOST_ARGUMENTS = {
    "segment_splits", "unique_splits", "received_splits", "send_splits", "id_splits", "num_rows", "row_splits",
    "num_targets", "thresholds", "table", "segment", "since", "count", "removed", "evicted", "size", "clock",
    "segments", "bytes", "feature_bags", "joined_splits", "lengths", "splits",
}  # fmt: skip
# Host arguments of other ops that an op takes on the device: it needs their shapes alone to know its sizes.
ON_THE_DEVICE = {"FuseIds": {"row_splits"}}

pytestmark = pytest.mark.skipif(
    not (pathlib.Path(_library.__file__).parent / "libfusedrec_cuda.so").exists(),
    reason="built without GPU kernels (no nvcc, or FUSEDREC_CUDA=0)",
)


def arguments_of_ops() -> dict[str, tuple[str, set[str]]]:
    """Returns op -> (its folder, names of its registered inputs and outputs)."""
    found = {}
    for path in sorted((ROOT / "custom_ops").rglob("*_op.cc")):
        if path.parent.name == "gloo_exchange":  # a library of its own, whose messages are in host memory
            continue
        for op in re.findall(r'_OP\("Fusedrec>(\w+)"\)', path.read_text(encoding="utf-8")):
            op_def = op_def_registry.get(f"Fusedrec>{op}")
            found[op] = path.parent.name, {arg.name for arg in [*op_def.input_arg, *op_def.output_arg]}
    return found


OPS = arguments_of_ops()


def registered(op, device):
    listed = kernels.get_registered_kernels_for_op(f"Fusedrec>{op}").kernel
    return [kernel for kernel in listed if kernel.device_type == device]


@pytest.mark.parametrize("op", OPS)
def test_the_op_has_a_gpu_kernel_for_the_types_of_the_cpu(op):
    on_cpu, on_gpu = registered(op, "CPU"), registered(op, "GPU")
    types = [sorted(str(kernel.constraint) for kernel in listed) for listed in (on_cpu, on_gpu)]
    assert on_gpu and types[0] == types[1]
    for kernel in on_gpu:
        on_host = set(kernel.host_memory_arg)
        assert on_host >= (OPS[op][1] & HOST_ARGUMENTS) - ON_THE_DEVICE.get(op, set())
        assert not on_host & ON_THE_DEVICE.get(op, set())
        if "table" not in OPS[op][1]:
            assert (on_host == OPS[op][1]) == (op in ON_THE_HOST)


def test_the_lists_name_what_is_there():
    assert set(ON_THE_HOST) | set(ON_THE_DEVICE) <= set(OPS)
