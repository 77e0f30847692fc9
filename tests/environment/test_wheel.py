"""The wheel carries the compiled ops and works from any folder; the build says clearly what it lacks."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOAD = """
import tf_fusedrec, sys
from tf_fusedrec.ops._library import library
print(tf_fusedrec.__file__)
print(tf_fusedrec.__version__, hasattr(library, "fusedrec_segment_unique"))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> pathlib.Path:
    """What a wheel is built from, with the objects that the set-up compiled (their commands hold no full path)."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("custom_ops", "tf_fusedrec", "requirements", "build/custom_ops"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md"):
        shutil.copy2(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(clone) -> pathlib.Path:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", "dist", "."],
        cwd=clone,
        check=True,
    )
    (path,) = (clone / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run(command, cwd=folder, check=True)
    return folder


def run_installed(program: str, installed: pathlib.Path, cwd: pathlib.Path) -> subprocess.CompletedProcess:
    """Runs a program with the installed wheel before everything else, from another folder."""
    env = {**os.environ, "PYTHONPATH": str(installed), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, env=env, capture_output=True, encoding="utf-8", errors="replace"
    )


def test_the_wheel_is_for_this_python_and_platform_and_carries_the_library(wheel):
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(rf"tf_fusedrec-[\d.]+-{tag}-{tag}-linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "tf_fusedrec/ops/_fusedrec_ops.so" in names and "tf_fusedrec/ops/_build_info.py" in names
    has_nvcc = shutil.which(os.environ.get("NVCC", "nvcc")) is not None
    assert ("tf_fusedrec/ops/libfusedrec_cuda.so" in names) == has_nvcc
    foreign = [n for n in names if not n.startswith("tf_fusedrec/") and ".dist-info/" not in n]
    assert foreign == []


def test_the_installed_wheel_works_from_another_folder(installed, tmp_path):
    done = run_installed(LOAD, installed, tmp_path)
    assert done.returncode == 0, done.stderr
    place, answer = done.stdout.splitlines()
    assert place == str(installed / "tf_fusedrec/__init__.py")
    (version,) = re.findall(r'__version__ = "(.*)"', (ROOT / "tf_fusedrec/__init__.py").read_text(encoding="utf-8"))
    assert answer == f"{version} True"


def test_a_library_for_another_tensorflow_says_so(installed, tmp_path):
    other = shutil.copytree(installed, tmp_path / "other")
    (other / "tf_fusedrec/ops/_build_info.py").write_text('TENSORFLOW_VERSION = "2.15.1"\n', encoding="utf-8")
    done = run_installed(LOAD, other, tmp_path)
    assert done.returncode != 0
    assert "were built for TensorFlow 2.15.1, but TensorFlow 2.16.2 is running" in done.stderr


def test_the_library_names_no_folder_of_the_building_machine(installed):
    dynamic = subprocess.run(
        ["readelf", "-d", str(installed / "tf_fusedrec/ops/_fusedrec_ops.so")],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=True,
    ).stdout
    assert "libtensorflow_framework.so.2" in dynamic
    paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic)
    assert paths == (["$ORIGIN"] if "libfusedrec_cuda.so" in dynamic else [])


def compiled(clone: pathlib.Path) -> list[str]:
    """Sources that `setup.py build_ext --inplace` compiles now."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=clone,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=True,
    )
    assert (clone / "tf_fusedrec/ops/_fusedrec_ops.so").exists()
    return re.findall(r"^compiling (\S+)$", done.stdout, re.MULTILINE)


def test_only_what_changed_is_compiled_again(clone, wheel):
    assert compiled(clone) == []
    source = clone / "custom_ops/recovery/recovery.cc"
    source.write_text(source.read_text(encoding="utf-8") + "\n// changed\n", encoding="utf-8")
    assert compiled(clone) == ["custom_ops/recovery/recovery.cc"]
    header = clone / "custom_ops/recovery/recovery.h"
    header.write_text(header.read_text(encoding="utf-8") + "\n// changed\n", encoding="utf-8")
    users = [
        path
        for path in (clone / "custom_ops").rglob("*.cc")
        if '"recovery/recovery.h"' in path.read_text(encoding="utf-8")
    ]
    assert sorted(compiled(clone)) == sorted(str(path.relative_to(clone)) for path in users) != []
    assert compiled(clone) == []


def test_a_build_without_tensorflow_says_what_to_do(clone, tmp_path):
    """In a virtual environment that holds the build tools and nothing else."""
    venv.create(tmp_path / "bare", with_pip=False)
    tools = tmp_path / "tools"
    tools.mkdir()
    import setuptools

    site = pathlib.Path(setuptools.__file__).parents[1]
    for name in ("setuptools", "pkg_resources", "_distutils_hack", "wheel"):
        (tools / name).symlink_to(site / name)
    done = subprocess.run(
        [str(tmp_path / "bare/bin/python"), "setup.py", "build_ext", "--inplace"],
        cwd=clone,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tools)},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    assert done.returncode != 0
    assert "cannot import it (ModuleNotFoundError: No module named 'tensorflow')" in done.stderr
    assert "Remedy: run `make setup`" in done.stderr
