"""Every op that has a kernel for the CPU has one for the GPU, for the same types, with sizes and splits on the host.

Registration is all that can be tested without a GPU; the kernels under these are run by tests/cuda and tests/gpu.
"""

from __future__ import annotations

import pathlib
import re

import pytest

from tf_fusedrec.ops import _library

from tensorflow.python.framework import kernels  # isort: skip  (tf_fusedrec first: it chooses legacy Keras)

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Folders whose ops run on the CPU alone, or such ops, and why.
ON_THE_CPU = {
    "fuse_ids": "its inputs come from the input pipeline, which is on the host",
    "hash_table": "tables of ops are in host memory; the one on the device (hash_table_cuda.h) has no OpKernels yet",
    "initial_rows": "for tables of other projects, which are in host memory",
    "JaggedBiasAttention": "there is no kernel for the channels of FuXi yet",
    "JaggedBiasAttentionGrad": "the same",
}
HOST_ARGUMENTS = {
    "segment_splits", "unique_splits", "received_splits", "send_splits", "id_splits", "num_rows", "row_splits",
    "num_targets", "thresholds",
}  # fmt: skip

pytestmark = pytest.mark.skipif(
    not (pathlib.Path(_library.__file__).parent / "libfusedrec_cuda.so").exists(),
    reason="built without GPU kernels (no nvcc, or FUSEDREC_CUDA=0)",
)


def arguments_of_ops() -> dict[str, tuple[str, set[str]]]:
    """Op -> its folder and the names of its inputs and outputs, as they are registered."""
    found = {}
    for path in sorted((ROOT / "custom_ops").glob("*/*_op.cc")):
        for op, text in re.findall(
            r'REGISTER_OP\("Fusedrec>(\w+)"\)(.*?)\.SetShapeFn', path.read_text(encoding="utf-8"), re.S
        ):
            found[op] = path.parent.name, set(re.findall(r'\.(?:Input|Output)\("(\w+):', text))
    return found


OPS = arguments_of_ops()


def on_the_cpu(op):
    return op in ON_THE_CPU or OPS[op][0] in ON_THE_CPU


def registered(op, device):
    listed = kernels.get_registered_kernels_for_op(f"Fusedrec>{op}").kernel
    return [kernel for kernel in listed if kernel.device_type == device]


@pytest.mark.parametrize("op", [op for op in OPS if not on_the_cpu(op)])
def test_the_op_has_a_gpu_kernel_for_the_types_of_the_cpu(op):
    on_cpu, on_gpu = registered(op, "CPU"), registered(op, "GPU")
    types = [sorted(str(kernel.constraint) for kernel in listed) for listed in (on_cpu, on_gpu)]
    assert on_gpu and types[0] == types[1]
    for kernel in on_gpu:
        assert set(kernel.host_memory_arg) >= OPS[op][1] & HOST_ARGUMENTS


@pytest.mark.parametrize("op", [op for op in OPS if on_the_cpu(op)])
def test_what_is_listed_for_the_cpu_alone_is_there_alone(op):
    assert registered(op, "CPU") and not registered(op, "GPU")


def test_the_list_names_what_is_there():
    assert set(ON_THE_CPU) <= {folder for folder, _ in OPS.values()} | set(OPS)
