"""benchmarks.serving, tiny: it writes its fields, and stops when the servers disagree."""

import threading
import time

import numpy as np
import pytest

from benchmarks.harness import harness
from benchmarks.serving import __main__ as serving
from benchmarks.serving.load import Load, latencies_ms
from tf_fusedrec import tf


def test_latencies_count_from_the_intended_time():
    """Every request takes 20 ms where one is answered at a time: at 100 per second they wait ever longer."""
    lock = threading.Lock()

    def ask(number):
        with lock:
            time.sleep(0.02)

    load = Load(requests=45, seconds=1.0, threads=4)
    waits = latencies_ms(ask, 100.0, load)
    assert waits.shape == (40,) and waits.min() >= 20
    assert waits[-10:].mean() > 200  # 45 requests arrive in 450 ms and take 900.

    def fails(number):
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        latencies_ms(fails, 100.0, load)


def test_servers_that_disagree_are_not_measured():
    def server(answer):
        return lambda **inputs: {"ctr": tf.constant([answer])}

    servers = {"stock": server(0.5), "ours": server(np.float32(0.51))}
    with pytest.raises(harness.CheckFailed, match="ctr"):
        serving.medians_ms(servers, [{}], 2)
