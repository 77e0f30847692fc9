"""Horovod's threads yield to computing threads. No other thread changes its policy."""

import os

import pytest

from tests.support.ranks import run_ranks
from tf_fusedrec.exchange import horovod


def _policies():
    import tf_fusedrec as fr

    fr.collectives.barrier()
    threads = horovod.threads_without_preemption()
    with horovod.with_preemption(threads):
        none_left = horovod.threads_without_preemption() == []
        horovod.stop_preemption_of_waiting_threads()  # as in a program that called hvd.init() itself
        loops = horovod.threads_without_preemption()
    found = none_left and 1 <= len(loops) < len(threads) and set(loops) < set(threads)
    return os.getpid() in threads, len(threads), found, horovod.threads_without_preemption() == threads


def test_horovods_threads_run_under_batch_and_python_does_not():
    for python_is_among_them, count, loop_is_found, all_back in run_ranks(_policies, 2):
        assert not python_is_among_them
        assert count >= 2  # the background thread and Gloo's loop
        assert loop_is_found and all_back


def test_a_process_of_another_policy_keeps_it(monkeypatch):
    monkeypatch.setattr(os, "sched_getscheduler", lambda thread: os.SCHED_IDLE)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: pytest.fail("policy changed"))
    with horovod.without_preemption():
        pass


def test_a_system_that_refuses_is_named_and_training_goes_on(monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with horovod.without_preemption():
        pass
    assert "SCHED_BATCH is refused" in caplog.text
