"""The kernels also compile for CUDA 12.3, with which TensorFlow 2.16 was built: by NVRTC, without a toolkit or a GPU.

NVRTC compiles device code only. The runtime functions that launchers call are older than CUDA 12.
"""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ROOT / "custom_ops"
# Headers that kernels include and NVRTC lacks.
STANDARD_HEADERS = {
    **dict.fromkeys(["cmath", "cstring"], ""),  # their functions are built in
    "cstdint": """
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef int int32_t; typedef long int64_t; typedef unsigned long uint64_t; typedef unsigned long uintptr_t;
""",
}
# Instances of templates, one for each kind. Attention has few, because they compile slowly.
KERNELS = {
    "fuse_ids/fuse_ids.cu": ["&fusedrec::fuse_ids::FuseIdsBagsKernel", "&fusedrec::CopyPiecesKernel"],
    "segment_unique/segment_unique.cu": ["&fusedrec::segment_unique::SegmentUniqueNumberKernel"],
    "rank_partition/rank_partition.cu": ["&fusedrec::rank_partition::RankPartitionPlaceKernel"],
    "initial_rows/initial_rows.cu": [
        f"&fusedrec::initial_rows::InitialRowsKernel<{type_}>"
        for type_ in ("float", "fusedrec::Half", "fusedrec::Bfloat16")
    ],
    "join_messages/join_messages.cu": ["&fusedrec::join_messages::MessageLengthsKernel"],
    "recovery/recovery.cu": [
        f"&fusedrec::recovery::{kernel}"
        for type_ in ("float", "fusedrec::Half", "fusedrec::Bfloat16")
        for kernel in (
            f"RecoverGradSumKernel<{type_}>",
            f"RecoverGradJoinKernel<{type_}>",
            f"PooledRecoverKernel<{type_}, fusedrec::recovery::OneArray<{type_}>>",
            f"PooledRecoverKernel<{type_}, fusedrec::recovery::Parts<{type_}>>",
        )
    ],
    "hash_table/cuda/hash_table_cuda.cuh": ["&fusedrec::device_table::NumberKernel"],
    "jagged_attention/cuda/jagged_attention_cuda.cuh": [
        "&fusedrec::attention::AttentionKernel<fusedrec::Bfloat16, 32, fusedrec::attention::kKeyGrads>",
        "&fusedrec::attention::GateGradsKernel<fusedrec::Bfloat16>",
        "&fusedrec::attention::NormGradsKernel<fusedrec::Bfloat16>",
        "&fusedrec::attention::ChannelsKernel<fusedrec::Bfloat16, 64>",
        "&fusedrec::attention::ChannelGradsKernel<fusedrec::Bfloat16, 64>",
    ],
}
# Further headers with kernels of the same op, which are compiled but not looked up by name.
MORE = {
    "jagged_attention/cuda/jagged_attention_cuda.cuh": ["jagged_attention/cuda/attention_channels.cuh"],
    "hash_table/cuda/hash_table_cuda.cuh": [
        f"hash_table/cuda/{part}" for part in ("select.cuh", "records.cu", "mixed.cu", "update.cu", "buffer/buffer.cu")
    ],
}


def load_nvrtc() -> ctypes.CDLL:
    """Loads NVRTC 12.3 of requirements/dev.txt; skips the test without it."""
    try:
        found = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        found = None
    if found is None or not found.submodule_search_locations:
        pytest.skip("nvidia-cuda-nvrtc-cu12 of requirements/dev.txt is not installed (it is there for Linux on x86-64)")
    library = pathlib.Path(list(found.submodule_search_locations)[0]) / "lib/libnvrtc.so.12"
    nvrtc = ctypes.CDLL(str(library))
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    assert (major.value, minor.value) == (12, 3)
    return nvrtc


def strings(texts):
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def compile_source(nvrtc: ctypes.CDLL, source: str, kernels: list[str]) -> tuple[int, str]:
    """Compiles to PTX for sm_80. Returns NVRTC's code and log."""
    headers = {
        str(p.relative_to(SOURCES)): p.read_text(encoding="utf-8")
        for p in SOURCES.rglob("*")
        if p.suffix in (".cu", ".cuh", ".h")
    }
    headers.update(STANDARD_HEADERS)
    program = ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernels.cu", len(headers), strings(headers.values()), strings(headers)
    )
    assert created == 0
    for kernel in kernels:
        assert nvrtc.nvrtcAddNameExpression(program, kernel.encode()) == 0
    flags = ["--gpu-architecture=compute_80", "--std=c++17", "--device-as-default-execution-space", "--fmad=false"]
    answer = nvrtc.nvrtcCompileProgram(program, len(flags), strings(flags))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return answer, log.value.decode()


@pytest.mark.parametrize("path", KERNELS)
def test_kernels_compile(path):
    source = "".join(f'#include "{header}"\n' for header in (path, *MORE.get(path, [])))
    answer, log = compile_source(load_nvrtc(), source, KERNELS[path])
    assert answer == 0, log


def test_newer_features_do_not_compile():
    answer, log = compile_source(load_nvrtc(), "#if CUDART_VERSION < 99999\n#error too old\n#endif\n", [])
    assert answer != 0 and "too old" in log


def test_no_op_is_left_out():
    ops = {path.relative_to(SOURCES).parts[0] for path in SOURCES.rglob("*_cuda.h")}
    assert ops == {path.split("/")[0] for path in KERNELS}
