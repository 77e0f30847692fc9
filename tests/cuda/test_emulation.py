"""The GPU kernels agree with their oracles when they run on the CPU (emulation/cuda_emulation.h); faults are found.

The emulation looks for wrong indices, barriers and collectives that diverge, and races of atomic operations under
several schedules. tests/gpu tests what it cannot see.
"""

from __future__ import annotations

import pytest

from tests.cuda import libraries, mutants, run_checks


@pytest.mark.parametrize("faults", ["written", pytest.param("none", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("op", libraries.OPS)
def test_kernels_agree_with_their_oracles(op, faults):
    """No fault is on. The sources without their text are compiled by night, because that takes minutes."""
    done = libraries.run_checks(op, faults=faults)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check_" in done.stdout


def test_a_name_that_selects_no_check_is_refused(capsys):
    """Before the library is opened, so that none is needed here."""
    for only in (["no_such_check"], ["check_", "no_such_check"]):
        with pytest.raises(SystemExit) as refused:
            run_checks.main(["segment_unique", "--library", "no_library.so", "--only", *only])
        assert refused.value.code == 2
        assert "--only no_such_check: no check of segment_unique has this in its name" in capsys.readouterr().err


def test_op_kernels_for_a_gpu_agree_with_those_for_the_cpu():
    """TensorFlow gives both the same inputs, right and wrong ones. The GPU kernels run over the emulation."""
    done = libraries.under_sanitizers("tests.cuda.run_op_kernels", str(libraries.build_op_kernels()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "op_kernels_memory agrees" in done.stdout


@pytest.mark.nightly
def test_models_of_two_ranks_agree_under_every_schedule():
    done = libraries.run_checks("programs", "rank-models")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("op", sorted({mutant.op for mutant in mutants.MUTANTS}))
def test_the_checks_find_every_fault(op):
    done = libraries.run_checks(op, "--faults", "written")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("found: ") == len(libraries.faults_of(op, "written"))


@pytest.mark.nightly
@pytest.mark.parametrize("op", [*(op for op in libraries.OPS if op != "hash_table"), "programs"])
def test_the_checks_find_most_drawn_faults(op):
    """Some drawn faults change no answer: a longer bound of memory, or a barrier too many."""
    done = libraries.run_checks(op, "--faults", "drawn", faults="drawn")
    found, drawn = done.stdout.count("found: "), len(libraries.faults_of(op, "drawn"))
    assert found >= drawn / 2 > 0, done.stdout + done.stderr
