"""GPU kernels are in a separate library that alone links CUDA, and every op has a GPU form."""

from __future__ import annotations

import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tf_fusedrec/ops"
CUDA_LIBRARY = FOLDER / "libfusedrec_cuda.so"

built_with_cuda = pytest.mark.skipif(
    not CUDA_LIBRARY.exists(), reason="built without GPU kernels (FUSEDREC_CUDA=1 makes them)"
)


def symbols(library: pathlib.Path) -> list[tuple[str, str]]:
    """Returns (type, name) of a library's dynamic symbols, without the versions of names."""
    listed = subprocess.run(
        ["nm", "-D", str(library)], capture_output=True, encoding="utf-8", errors="replace", check=True
    ).stdout
    return [(fields[-2], fields[-1].split("@")[0]) for fields in map(str.split, listed.splitlines())]


def is_cuda(name: str) -> bool:
    return re.match(r"_{0,2}cu(da|blas|dnn)|_{0,2}nv|cu[A-Z]", name) is not None


@built_with_cuda
def test_no_name_of_cuda_leaks_in_or_out():
    ours = symbols(CUDA_LIBRARY)
    assert [name for _, name in ours if is_cuda(name)] == []
    exported = [name for kind, name in ours if kind not in "Uw"]
    assert exported and all(name.startswith("fusedrec_") for name in exported), exported
    wanted = [name for kind, name in symbols(FOLDER / "_fusedrec_ops.so") if kind == "U"]
    assert [name for name in wanted if is_cuda(name)] == []
    # The library exports every symbol that the op library needs, and only declared symbols.
    assert {name for name in wanted if name.startswith("fusedrec_")} <= set(exported)
    headers = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "custom_ops").rglob("*.h"))
    assert set(re.findall(r"FUSEDREC_CUDA_API [\w ]+?\*?\s*(fusedrec_\w+)\(", headers)) == set(exported)


@built_with_cuda
def test_the_op_library_finds_the_kernels_beside_it_and_needs_no_driver():
    dynamic = subprocess.run(
        ["readelf", "-d", str(FOLDER / "_fusedrec_ops.so")],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=True,
    ).stdout
    assert "[libfusedrec_cuda.so]" in dynamic and "[$ORIGIN]" in dynamic
    for library in (CUDA_LIBRARY, FOLDER / "_fusedrec_ops.so"):
        needed = subprocess.run(
            ["readelf", "-d", str(library)], capture_output=True, encoding="utf-8", errors="replace", check=True
        ).stdout
        assert "libcuda" not in needed, needed


@built_with_cuda
def test_there_is_machine_code_for_every_architecture_and_ptx():
    cuobjdump = shutil.which("cuobjdump")
    if cuobjdump is None:
        pytest.skip("cuobjdump of the CUDA toolkit is not on PATH")
    listed = subprocess.run(
        [cuobjdump, "--list-elf", "--list-ptx", str(CUDA_LIBRARY)],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=True,
    ).stdout
    wanted = {f"sm_{number}" for number in os.environ.get("FUSEDREC_CUDA_ARCHS", "80 90").split()}
    assert set(re.findall(r"sm_\w+(?=\.cubin)", listed)) == wanted
    assert set(re.findall(r"sm_\w+(?=\.ptx)", listed)) == {max(wanted)}


def build(**env: str) -> subprocess.CompletedProcess:
    """Runs `setup.py build_ext`, which refuses before it compiles anything."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, encoding="utf-8", errors="replace"
    )


def test_cuda_that_is_wanted_and_not_there_is_an_error_with_its_remedy(tmp_path):
    done = build(FUSEDREC_CUDA="1", NVCC=str(tmp_path / "nvcc"))
    assert done.returncode != 0
    assert "FUSEDREC_CUDA=1, but the CUDA compiler" in done.stderr and "or build without GPU kernels" in done.stderr


@pytest.fixture
def find_nvcc(monkeypatch, tmp_path):
    """The function of setup.py, on a PATH with these programs alone: name -> what it prints."""
    monkeypatch.setattr("setuptools.setup", lambda **metadata: None)
    find = runpy.run_path(str(ROOT / "setup.py"))["find_nvcc"]
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    def on_path(wanted, programs):
        monkeypatch.setenv("FUSEDREC_CUDA", wanted)
        for name, printed in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\necho '{printed}'\n", encoding="utf-8")
            (tmp_path / name).chmod(0o755)
        return find()

    return on_path


GPU = {"nvidia-smi": "GPU 0: NVIDIA H100 (UUID: GPU-1)"}
NO_GPU = {"nvidia-smi": "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."}


@pytest.mark.parametrize(
    ("wanted", "programs", "used"),
    [
        ("auto", {"nvcc": "", **GPU}, "nvcc"),
        ("auto", {"nvcc": ""}, None),
        ("auto", {"nvcc": "", **NO_GPU}, None),
        ("auto", GPU, None),
        ("1", {"nvcc": ""}, "nvcc"),
        ("0", {"nvcc": "", **GPU}, None),
    ],
)
def test_cuda_is_compiled_where_it_is_asked_for_or_nvcc_and_a_gpu_are(find_nvcc, wanted, programs, used):
    assert find_nvcc(wanted, programs) == used


def test_continuous_integration_asks_for_cuda():
    assert "\nexport FUSEDREC_CUDA=1 FUSEDREC_CUDA_ARCHS=80\n" in (ROOT / ".ci/run").read_text(encoding="utf-8")


@pytest.fixture
def cuda_architectures(monkeypatch):
    """The function of setup.py, for a value of FUSEDREC_CUDA_ARCHS, or without one."""
    monkeypatch.setattr("setuptools.setup", lambda **metadata: None)
    flags = runpy.run_path(str(ROOT / "setup.py"))["cuda_architectures"]

    def wanted(value):
        if value is None:
            monkeypatch.delenv("FUSEDREC_CUDA_ARCHS", raising=False)
        else:
            monkeypatch.setenv("FUSEDREC_CUDA_ARCHS", value)
        return flags()

    return wanted


@pytest.mark.parametrize(
    ("value", "machine_code", "ptx"),
    [(None, ["80", "90"], "90"), ("80", ["80"], "80"), ("100 90", ["100", "90"], "100")],
)
def test_architectures_get_machine_code_and_the_newest_ptx(cuda_architectures, value, machine_code, ptx):
    flags = cuda_architectures(value)
    assert flags[::2] == ["-gencode"] * (len(machine_code) + 1)
    codes = [f"arch=compute_{number},code=sm_{number}" for number in machine_code]
    assert flags[1::2] == [*codes, f"arch=compute_{ptx},code=compute_{ptx}"]


@pytest.mark.parametrize("value", ["", "sm_80", "8.0", "80,90", "native"])
def test_other_names_of_architectures_are_refused(cuda_architectures, value):
    with pytest.raises(SystemExit, match=f"FUSEDREC_CUDA_ARCHS must be .*, got {value!r}"):
        cuda_architectures(value)


def test_another_wish_is_refused():
    done = build(FUSEDREC_CUDA="yes")
    assert done.returncode != 0 and "FUSEDREC_CUDA must be auto, 0 or 1, got 'yes'" in done.stderr
