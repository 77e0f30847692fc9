"""The harness: checks name what differs, clocks and turns are fair, and processes end with the benchmark."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.harness import harness, network, processes
from benchmarks.harness.harness import Batches, ZipfIds
from benchmarks.harness.processes import Remote
from benchmarks.harness.stage_times import BEFORE, DENSE, REST, MarkedStep, stage_ms
from benchmarks.harness.training import content_of
from tests.benchmarks.children import double, served
from tests.support.ranks import run_ranks
from tf_fusedrec import ops, tf

WHY_NOT = network.why_not()


def test_checks_fail_beyond_the_tolerance_and_name_what_differs():
    harness.check_equal("ids", np.array([1, 2]), [1, 2])
    harness.check_close("loss", [1.0, 2.0], [1.0, 2.0 + 1e-6], relative=1e-6)
    for got, want in (([1, 5, 6], [1, 2, 3]), ([1], [1, 2])):
        with pytest.raises(harness.CheckFailed, match=r"ids:\s+Arrays are not equal"):
            harness.check_equal("ids", got, want)
    for got, want in (([1.0, 2.1], [1.0, 2.0]), ([np.nan], [1.0]), ([np.nan], [np.nan]), ([1.0], [1.0, 2.0])):
        with pytest.raises(harness.CheckFailed, match=r"loss \(tolerated: rounding\):\s+Not equal to tolerance"):
            harness.check_close("loss", got, want, relative=1e-2, reason="rounding")


def test_variants_take_turns_and_medians_count():
    turns = list(harness.in_turns(["a", "b"], repeats=2, warmup=1))
    assert turns == [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a")]
    calls = []
    times = harness.measure({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, warmup=1, repeats=2)
    assert calls == [name for _, name in turns] and all(0 <= t.median_s <= t.p90_s for t in times.values())


def turns_of_two_ranks():
    from benchmarks.harness import ranks
    from tf_fusedrec.exchange import collectives

    seen = []

    def slow(repeat):
        seen.append(repeat)
        time.sleep(0.02 + 0.06 * collectives.rank())

    found = ranks.turns({"slow": slow, "quick": lambda _: None}, warmup=1, repeats=3, inputs=lambda n: (n,))
    return seen, found.wall["slow"].tolist()


@pytest.mark.nightly
def test_the_slowest_rank_counts():
    for seen, slow in run_ranks(turns_of_two_ranks, 2):
        assert seen == [-1, 0, 1, 2] and len(slow) == 3
        assert min(slow) >= 0.08


def test_nodes_are_counted_once_for_every_call_of_their_function():
    one_sine = tf.function(lambda x: tf.sin(x))

    @tf.function
    def step(x):
        x = tf.cond(x > 0, lambda: tf.sin(x), lambda: tf.cos(x))
        return tf.while_loop(lambda y: y < 2, lambda y: (one_sine(y) + one_sine(y + 1),), [x])[0]

    graph = step.get_concrete_function(tf.constant(1.0)).graph.as_graph_def()
    assert (harness.count_nodes(graph, "Sin"), harness.count_nodes(graph, "Cos")) == (3, 1)
    alone = tf.function(lambda x: x + 1).get_concrete_function(tf.constant(1.0)).graph.as_graph_def()
    alone.library.CopyFrom(graph.library)
    assert harness.count_nodes(alone, "Sin") == 0, "nobody calls them"


def test_ids_are_skewed_and_a_function_of_step_and_rank():
    ids = ZipfIds(1000, 1.2).draw(np.random.default_rng(0), (20_000,))
    assert ids.dtype == np.int64 and ids.min() >= 0 and ids.max() < 1 << 40
    counts = np.sort(np.unique(ids, return_counts=True)[1])
    # p(1) / p(2) = 2^1.2 = 2.3; 4000 draws of the hottest have a standard deviation of 2 %.
    assert len(counts) <= 1000 and 2.0 < counts[-1] / counts[-2] < 2.6
    batches = Batches(features=3, batch_size=8, ids_per_feature=2, alpha=1.05)
    first, again, other = batches.batch(5, 1), batches.batch(5, 1), batches.batch(5, 0)
    np.testing.assert_array_equal(first.ids, again.ids)
    assert first.ids.shape == (3, 8, 2) and not np.array_equal(first.ids, other.ids)
    np.testing.assert_array_equal(harness.id_of(first.order), first.ids)
    assert batches.vocabularies == [1000, 31622, 1000000]


def test_a_data_set_is_known_by_its_files_and_their_bytes(tmp_path):
    def folder_of(name, **files):
        (tmp_path / name / "train").mkdir(parents=True)
        for number, (file, text) in enumerate(files.items()):
            (tmp_path / name / "train" / file).write_text(text, encoding="utf-8")
            os.utime(tmp_path / name / "train" / file, (number, number))
        return tmp_path / name

    one = content_of(folder_of("one", a="1", b="2"))
    assert content_of(folder_of("copy", b="2", a="1")) == one and len(one) == 16
    for name, files in {
        "byte": {"a": "1", "b": "3"},
        "name": {"a": "1", "c": "2"},
        "border": {"a": "12", "b": ""},
    }.items():
        assert content_of(folder_of(name, **files)) != one, name


def test_time_goes_to_the_stage_that_waited():
    def slowly(x):
        def sleep(value):
            time.sleep(0.05)
            return value

        return tf.ensure_shape(tf.numpy_function(sleep, [x], x.dtype, stateful=False), x.shape)

    def step(ids):
        unique = ops.segment_unique(ids, tf.constant([0, 3], tf.int64))
        rows = ops.recover(slowly(tf.zeros([2, 4]) + tf.cast(ids[0], tf.float32)), unique.inverse)
        # A stateful op behind the stages makes no circle of their clocks.
        with tf.control_dependencies([tf.cond(tf.size(unique.ids) > 5, lambda: tf.print("many"), tf.no_op)]):
            gradients = slowly(tf.ensure_shape(rows, [3, 4]))
        return ops.recover_grad(gradients, unique.inverse, tf.size(unique.ids, out_type=tf.int64))

    marked = MarkedStep(step)
    ms = stage_ms([marked.run(tf.constant([7, 8, 7], tf.int64)) for _ in range(4)][1:])
    assert list(ms) == [BEFORE, "deduplicate ids", "rows in the order of ids", DENSE, "sum gradients by id", REST]
    assert ms["rows in the order of ids"] > 45 and ms[DENSE] > 45
    runs = [{"b": [0.003], "a": [0.001, 0.004], "end": [end]} for end in (0.005, 0.007, 0.006)]
    assert stage_ms(runs) == pytest.approx({"a": 2.0, "b": 2.0, "end": 2.0}) and list(stage_ms(runs)) == [
        "a",
        "b",
        "end",
    ]


def test_a_child_answers_and_a_silent_one_ends_the_run_with_its_last_lines():
    assert processes.ask(double, number=21) == 42
    with pytest.raises(harness.CheckFailed, match=r"(?s)double with \{'number': 0\} ended with code 0.*the last line"):
        processes.ask(double, number=0)
    with Remote(sys.executable, served) as side:
        assert side.check() == []
        times = side.times("step", 3) + [[wall, 0.0] for wall in side.steps("step", 1)]
        assert side.check() == ["begin", "end"] * 2
        with pytest.raises(
            harness.CheckFailed, match=f"--peer {sys.executable} lacks a library: one. Install it there"
        ):
            side.check_libraries()
    for n, (wall, cpu) in enumerate(times):
        assert 0.01 * n <= wall < 0.4 and cpu < wall + 0.01, "a step slept, and its preparation is not measured"
    with pytest.raises(harness.CheckFailed, match="double ended with code 0. Its errors are printed above"):
        Remote(sys.executable, double, number=0)


def test_a_stopped_process_goes_on_whatever_happens_in_the_body():
    with processes.started([sys.executable, "-c", "import time; time.sleep(300)"]) as sleeper:
        with pytest.raises(KeyError), processes.stopped(sleeper.pid):
            assert os.WIFSTOPPED(os.waitpid(sleeper.pid, os.WUNTRACED)[1])
            raise KeyError
        assert os.WIFCONTINUED(os.waitpid(sleeper.pid, os.WCONTINUED | os.WNOHANG)[1])
        sleeper.kill()


def test_a_failed_check_or_a_missing_horovodrun_ends_the_run(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SystemExit) as stop:
        processes.program(lambda: processes.ask_ranks(double, 2, number=1))
    assert stop.value.code == 1
    assert "CHECK FAILED: 2 ranks need horovodrun, but it is not beside" in capsys.readouterr().err


# A port without a server answers a connection with a refusal, one round trip later.
ASK = """
import socket, time
begin = time.monotonic()
try:
    socket.create_connection(("10.0.0.2", 9999))
except ConnectionRefusedError:
    print(time.monotonic() - begin)
"""


@pytest.mark.nightly
@pytest.mark.skipif(WHY_NOT is not None or not network.TAP_DEVICE.exists(), reason=f"{WHY_NOT}, or no TAP devices")
def test_the_cable_delays(tmp_path):
    with network.two_hosts(tmp_path, tmp_path / "delay") as (on_first, _):
        network.set_delay(tmp_path / "delay", 0.02)
        done = subprocess.run([*on_first, sys.executable, "-c", ASK], capture_output=True, check=True, timeout=60)
    assert float(done.stdout) >= 0.04
