"""The kernels for GPUs, run on the CPU (emulation/cuda_emulation.h), against their oracles; and that faults are found.

The emulation looks for wrong indices, barriers and collectives that diverge, and races of atomic operations under
several schedules. What it cannot see is left to tests/gpu.
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import shutil
import subprocess

import pytest

from tests.cuda import libraries
from tests.cuda.mutants import MUTANTS

OPS = sorted(path.parent.name for path in (libraries.ROOT / "custom_ops").glob("*/*_cuda.cuh"))
WORKERS = 2


@pytest.fixture(scope="module")
def built() -> dict[str, pathlib.Path]:
    """The emulated library of every op."""
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        folder = libraries.ROOT / "build/emulation"
        return dict(zip(OPS, pool.map(lambda op: libraries.build(op, folder), OPS)))


@pytest.mark.parametrize("op", OPS)
def test_kernels_agree_with_their_oracles(built, op):
    done = libraries.run_checks(op, built[op])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check_" in done.stdout


def test_op_kernels_for_a_gpu_agree_with_those_for_the_cpu(built):
    """TensorFlow runs the code of the former over the emulation: the same inputs to both, and wrong inputs."""
    library = libraries.build_op_kernels(built["hash_table"].parent, built.values())
    done = libraries.under_sanitizers("tests.cuda.run_op_kernels", str(library))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "op_kernels_table agrees" in done.stdout


def run_mutant(mutant, folder: pathlib.Path) -> subprocess.CompletedProcess:
    sources = folder / "custom_ops"
    shutil.copytree(libraries.ROOT / "custom_ops", sources, ignore=shutil.ignore_patterns("*.cc", "*.md"))
    changes = [(mutant.path, mutant.old, mutant.new), *([mutant.smaller] if mutant.smaller else [])]
    for name, old, new in changes:
        text = (sources / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{mutant.name}: {old!r} is {text.count(old)} times in {name}"
        (sources / name).write_text(text.replace(old, new), encoding="utf-8")
    libraries.reuse(mutant.op, libraries.ROOT / "build/emulation", folder, {name for name, *_ in changes})
    # Without the second sanitizer, which doubles the time of a compilation and is not what finds them.
    library = libraries.build(mutant.op, folder, sources, "-fno-sanitize=undefined")
    return libraries.run_checks(mutant.op, library, "--only", mutant.only)


@pytest.fixture(scope="module")
def checked(built, tmp_path_factory):
    """What the checks say of a mutant; compiled as far as it differs."""
    run = lambda mutant: run_mutant(mutant, tmp_path_factory.mktemp("mutant"))  # noqa: E731
    if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the tests among themselves
        yield run
        return
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        running = {mutant.name: pool.submit(run, mutant) for mutant in MUTANTS}
        yield lambda mutant: running[mutant.name].result()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_fault_is_found(checked, mutant):
    done = checked(mutant)
    said = done.stdout + done.stderr
    assert done.returncode != 0, f"nothing was found:\n{said}"
    assert mutant.words in said
