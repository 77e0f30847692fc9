"""The GPU kernels agree with their oracles when they run on the CPU (emulation/cuda_emulation.h); faults are found.

The emulation looks for wrong indices, barriers and collectives that diverge, and races of atomic operations under
several schedules. tests/gpu tests what it cannot see.
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import subprocess

import pytest

from tests.cuda import libraries, mutants, run_checks

OPS = libraries.OPS
WORKERS = 2
ALL = list(enumerate(mutants.MUTANTS, 1))


@pytest.fixture(scope="module")
def built() -> dict[str, pathlib.Path]:
    """Returns the emulated library of every op."""
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        folder = libraries.ROOT / "build/emulation"
        return dict(zip(OPS, pool.map(lambda op: libraries.build(op, folder), OPS)))


@pytest.mark.parametrize("op", OPS)
def test_kernels_agree_with_their_oracles(built, op):
    done = libraries.run_checks(op, built[op])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check_" in done.stdout


def test_a_name_that_selects_no_check_is_refused(capsys):
    """Before the library is opened, so that none is needed here."""
    for only in (["no_such_check"], ["check_", "no_such_check"]):
        with pytest.raises(SystemExit) as refused:
            run_checks.main(["segment_unique", "--library", "no_library.so", "--only", *only])
        assert refused.value.code == 2
        assert "--only no_such_check: no check of segment_unique has this in its name" in capsys.readouterr().err


def test_op_kernels_for_a_gpu_agree_with_those_for_the_cpu(built):
    """TensorFlow gives both the same inputs, right and wrong ones. The GPU kernels run over the emulation."""
    library = libraries.build_op_kernels(built["hash_table"].parent, built.values())
    done = libraries.under_sanitizers("tests.cuda.run_op_kernels", str(library))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "op_kernels_ranks agrees" in done.stdout


def build_with_faults(op: str) -> pathlib.Path:
    """Builds the library of an op with all its faults, which are off until a run turns one on."""
    folder = libraries.ROOT / "build/faults" / op
    mutants.write_sources(op, libraries.ROOT / "custom_ops", folder / "custom_ops")
    # Without the second sanitizer, which doubles the time of a compilation and finds none of the faults.
    return libraries.build(op, folder, folder / "custom_ops", "-fno-sanitize=undefined")


def run_mutant(number: int, mutant: mutants.Mutant) -> subprocess.CompletedProcess:
    library = build_with_faults(mutant.op)
    return libraries.run_checks(mutant.op, library, "--fault", str(number), "--only", mutant.only)


@pytest.fixture(scope="module")
def checked():
    """Yields a function that runs the checks on a mutant."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the tests
        yield run_mutant
        return
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        running = {number: pool.submit(run_mutant, number, mutant) for number, mutant in ALL}
        yield lambda number, _: running[number].result()


@pytest.mark.parametrize("op", sorted({mutant.op for mutant in mutants.MUTANTS}))
def test_without_a_fault_nothing_is_found(op):
    """Runs the checks that find the faults, over the library that contains them."""
    only = sorted({mutant.only for _, mutant in mutants.numbered(op)})
    done = libraries.run_checks(op, build_with_faults(op), "--schedules", "1", "--only", *only)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("number", "mutant"), ALL, ids=[mutant.name for _, mutant in ALL])
def test_a_fault_is_found(checked, number, mutant):
    done = checked(number, mutant)
    said = done.stdout + done.stderr
    assert done.returncode != 0, f"nothing was found:\n{said}"
    assert mutant.words in said
