"""setup.py chooses compilers and requirements, packs every module, and builds libraries that load on other machines."""

from __future__ import annotations

import email
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import setuptools

from tests.support.setup_py import names_of_setup, packed_files
from tests.support.shared import ROOT
from tf_fusedrec.exchange import gloo
from tf_fusedrec.ops._library import LIBRARY_PATH
from tools import object_cache, wheel

CUDA_LIBRARY = LIBRARY_PATH.parent / "libfusedrec_cuda.so"
LICENSES = ["LICENSE", "custom_ops/gloo_exchange/LICENSE.gloo"]
OF_THE_SYSTEM = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
GPU = {"nvidia-smi": "GPU 0: NVIDIA H100 (UUID: GPU-1)"}
NO_GPU = {"nvidia-smi": "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."}

built_with_cuda = pytest.mark.skipif(
    not CUDA_LIBRARY.exists(), reason="built without GPU kernels (FUSEDREC_CUDA=1 makes them)"
)


@pytest.fixture
def setup_py():
    return names_of_setup()


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Returns a function that makes a PATH of these programs alone: name -> what it prints."""
    for name in ("NVCC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    def on_path(**printed):
        for name, text in printed.items():
            (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}'\n", encoding="utf-8")
            (tmp_path / name).chmod(0o755)

    return on_path


def listed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True).stdout


def dynamic(library: pathlib.Path, field: str) -> list[str]:
    return re.findall(rf"\((?:{field})\).*\[(.*)\]", listed("readelf", "-d", str(library)))


def symbols(library: pathlib.Path) -> list[tuple[str, str]]:
    """Returns (type, name) of a library's dynamic symbols, without the versions of names."""
    lines = map(str.split, listed("nm", "-D", str(library)).splitlines())
    return [(fields[-2], fields[-1].split("@")[0]) for fields in lines]


def is_cuda(name: str) -> bool:
    return re.match(r"_{0,2}cu(da|blas|dnn)|_{0,2}nv|cu[A-Z]", name) is not None


@pytest.mark.filterwarnings("ignore:The .wheel. package is no longer")
def test_a_wheel_holds_every_module_the_marker_of_types_and_the_licence(setup_py, monkeypatch):
    monkeypatch.chdir(ROOT)
    described = setuptools.Distribution({**setup_py["described"], "script_name": "setup.py"})
    described.parse_config_files()
    described.include_package_data = False  # which would add what an earlier build has listed
    command = described.get_command_obj("build_py")
    command.ensure_finalized()
    packed = {str(pathlib.Path(path).relative_to(command.build_lib)) for path in command.get_outputs()}
    sources = {*packed_files("**/*.py"), *packed_files("configs/**/*.yaml")}
    assert packed == {*sources, "tf_fusedrec/py.typed"}
    assert described.metadata.license == "Apache-2.0" and described.metadata.license_files == LICENSES


def test_a_wheel_requires_the_tensorflow_of_its_build_and_a_source_distribution_any(setup_py, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.19.1")
    version, required = setup_py["version_and_requirements"]()
    assert version.endswith(".2.19.1") and "tensorflow==2.19.1" in required
    monkeypatch.setattr(sys, "argv", ["setup.py", "sdist"])
    plain, required = setup_py["version_and_requirements"]()
    assert f"{plain}.2.19.1" == version
    assert f"tensorflow{setup_py['ALLOWED_TENSORFLOW']}" in required


def test_the_wheel_of_gpu_kernels_requires_the_other_one_of_its_version(tmp_path):
    ops, plain = tmp_path / "ops", tmp_path / "tf_fusedrec-0.1.0.2.16.2-py3-none-linux_x86_64.whl"
    files = ("_build_info.py", "_fusedrec_ops.so", "libfusedrec_cuda.so")
    ops.mkdir()
    for name in files:
        (ops / name).write_text(name, encoding="utf-8")
    fields = "Name: tf_fusedrec\nVersion: 0.1.0.2.16.2\nLicense: Apache-2.0\nRequires-Dist: numpy\n"
    tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n"
    with zipfile.ZipFile(plain, "w") as archive:
        for name, text in {"METADATA": fields, "WHEEL": tag, "LICENSE": "the licence"}.items():
            archive.writestr(f"tf_fusedrec-0.1.0.2.16.2.dist-info/{name}", text)
    path = wheel.pack_cuda(ops, plain, tmp_path)
    assert path.name == plain.name.replace("tf_fusedrec-", "tf_fusedrec_cuda-", 1)
    packed = zipfile.ZipFile(path)
    info = "tf_fusedrec_cuda-0.1.0.2.16.2.dist-info"
    assert {f"tf_fusedrec_cuda/{name}" for name in ("__init__.py", *files)} == {
        name for name in packed.namelist() if not name.startswith(info)
    }
    fields = email.message_from_bytes(packed.read(f"{info}/METADATA"))
    assert (fields["Name"], fields["License"]) == ("tf_fusedrec_cuda", "Apache-2.0")
    assert fields.get_all("Requires-Dist") == ["tf_fusedrec (==0.1.0.2.16.2)"]
    assert packed.read(f"{info}/LICENSE") == b"the licence"


@pytest.mark.parametrize(
    ("wanted", "present", "used"),
    [
        ("auto", {"nvcc": "", **GPU}, "nvcc"),
        ("auto", {"nvcc": ""}, None),
        ("auto", {"nvcc": "", **NO_GPU}, None),
        ("auto", GPU, None),
        ("1", {"nvcc": ""}, "nvcc"),
        ("0", {"nvcc": "", **GPU}, None),
    ],
)
def test_cuda_is_compiled_where_it_is_asked_for_or_nvcc_and_a_gpu_are(
    setup_py, programs, monkeypatch, wanted, present, used
):
    programs(**present)
    monkeypatch.setenv("FUSEDREC_CUDA", wanted)
    assert setup_py["find_nvcc"]() == used


@pytest.mark.parametrize(
    ("value", "machine_code", "ptx"),
    [(None, ["80", "90"], "90"), ("80", ["80"], "80"), ("100 90", ["100", "90"], "100")],
)
def test_architectures_get_machine_code_and_the_newest_ptx(setup_py, monkeypatch, value, machine_code, ptx):
    monkeypatch.delenv("FUSEDREC_CUDA_ARCHS", raising=False)
    if value is not None:
        monkeypatch.setenv("FUSEDREC_CUDA_ARCHS", value)
    flags = setup_py["cuda_architectures"]()
    assert flags[::2] == ["-gencode"] * (len(machine_code) + 1)
    codes = [f"arch=compute_{number},code=sm_{number}" for number in machine_code]
    assert flags[1::2] == [*codes, f"arch=compute_{ptx},code=compute_{ptx}"]


@pytest.mark.parametrize(
    ("function", "variables", "words"),
    [
        ("find_nvcc", {"FUSEDREC_CUDA": "yes"}, r"FUSEDREC_CUDA must be auto, 0 or 1, got 'yes'"),
        ("find_nvcc", {"FUSEDREC_CUDA": "1"}, r"the CUDA compiler 'nvcc' is not on PATH. Remedy: .*FUSEDREC_CUDA=0"),
        *(
            ("cuda_architectures", {"FUSEDREC_CUDA_ARCHS": value}, f"FUSEDREC_CUDA_ARCHS must be .*, got {value!r}")
            for value in ("", "sm_80", "8.0", "80,90", "native")
        ),
        ("op_library", {}, r"the C\+\+ compiler 'g\+\+' is not on PATH. Remedy: install g\+\+ .* in CXX"),
    ],
)
def test_a_build_that_cannot_be_is_refused_with_its_remedy(setup_py, programs, monkeypatch, function, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=f"^error: .*{words}"):
        setup_py[function](*([None] if function == "op_library" else []))


def test_a_build_without_tensorflow_says_what_to_do(setup_py, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'tensorflow'\" >&2; exit 1\n", "utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(object_cache.Failed, match=r"\(ModuleNotFoundError: .*'tensorflow'\). Remedy: run `make setup`"):
        object_cache.describe_tensorflow()


def test_the_op_library_loads_under_any_tensorflow_of_its_number():
    """Without CUDA and a driver, from any folder, and under tensorflow-cpu, which has the same framework library."""
    beside = {CUDA_LIBRARY.name} if CUDA_LIBRARY.exists() else set()
    assert {"libtensorflow_framework.so.2", *beside} <= set(dynamic(LIBRARY_PATH, "NEEDED"))
    assert set(dynamic(LIBRARY_PATH, "NEEDED")) - OF_THE_SYSTEM == {"libtensorflow_framework.so.2", *beside}
    assert dynamic(LIBRARY_PATH, "RPATH|RUNPATH") == ["$ORIGIN"] * bool(beside)
    assert [name for kind, name in symbols(LIBRARY_PATH) if kind == "U" and is_cuda(name)] == []


@pytest.mark.parametrize("library", [LIBRARY_PATH, gloo.LIBRARY_PATH], ids=["ops", "gloo"])
def test_the_ops_load_on_linux_of_2018(library):
    """No symbol is newer than glibc 2.28 and GCC 8, the bounds of manylinux_2_28. TensorFlow's own bound is as old."""
    if not library.exists():
        pytest.skip("built without Gloo's sources")
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
    text = listed("readelf", "--wide", "--version-info", str(library))
    found = re.findall(r"Name: ([A-Z]+)_([\d.]+)", text)
    assert {name for name, _ in found} >= set(newest)
    assert not [(name, number) for name, number in found if tuple(map(int, number.split("."))) > newest.get(name, (9,))]


@built_with_cuda
def test_the_library_of_kernels_needs_no_driver_and_exports_what_the_ops_need():
    assert set(dynamic(CUDA_LIBRARY, "NEEDED")) <= OF_THE_SYSTEM
    ours = symbols(CUDA_LIBRARY)
    assert [name for _, name in ours if is_cuda(name)] == []
    exported = {name for kind, name in ours if kind not in "Uw"}
    assert exported and all(name.startswith("fusedrec_") for name in exported), exported
    needed = {name for kind, name in symbols(LIBRARY_PATH) if kind == "U" and name.startswith("fusedrec_")}
    headers = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "custom_ops").rglob("*.h"))
    declared = set(re.findall(r"FUSEDREC_CUDA_API [\w ]+?\*?\s*(fusedrec_\w+)\(", headers))
    assert needed <= exported == declared


@built_with_cuda
def test_there_is_machine_code_for_every_architecture_and_ptx():
    cuobjdump = shutil.which("cuobjdump")
    if cuobjdump is None:
        pytest.skip("cuobjdump of the CUDA toolkit is not on PATH")
    text = listed(cuobjdump, "--list-elf", "--list-ptx", str(CUDA_LIBRARY))
    wanted = {f"sm_{number}" for number in os.environ.get("FUSEDREC_CUDA_ARCHS", "80 90").split()}
    assert set(re.findall(r"sm_\w+(?=\.cubin)", text)) == wanted
    assert set(re.findall(r"sm_\w+(?=\.ptx)", text)) == {max(wanted)}
