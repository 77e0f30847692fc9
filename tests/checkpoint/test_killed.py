"""A job with SIGKILLs at random moments, also inside saves, ends with the weights of an undisturbed job."""

import multiprocessing
import signal

import numpy as np
import pytest

from tests.checkpoint import killed_job


def lives(directory, result, kills):
    """Returns the exit codes of a job that restarts after every kill. Each life is a fork of a server that has only
    imported TensorFlow.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([killed_job.__name__])
    codes = []
    for kill in kills:
        life = context.Process(target=killed_job.run, args=(str(directory), str(result), kill))
        life.start()
        life.join(600)
        codes.append(life.exitcode)
    return codes


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.nightly)])
def test_killed_at_random_moments_and_no_bit_differs(kills, tmp_path):
    """test_crashes.py has every moment of a save, in one process."""
    random = np.random.default_rng(kills)
    kills = [
        ("operation", int(random.integers(0, 60))) if n % 2 else ("seconds", float(random.uniform(0, 0.1)))
        for n in range(kills)
    ]
    assert lives(tmp_path / "whole", tmp_path / "whole.npz", [None]) == [0]
    codes = lives(tmp_path / "killed", tmp_path / "killed.npz", [*kills, None])
    assert codes == [-signal.SIGKILL] * len(kills) + [0], kills
    with np.load(tmp_path / "whole.npz") as want, np.load(tmp_path / "killed.npz") as got:
        assert sorted(got) == sorted(want)
        differ = [name for name in want if got[name].tobytes() != want[name].tobytes()]
        assert not differ, kills
        assert len(want["item-ids"]) > 50 and 0 < len(want["user-ids"]) <= 25  # some of 40 were evicted
        assert want["steps"] == killed_job.EPOCHS * killed_job.STEPS
