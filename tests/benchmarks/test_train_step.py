"""benchmarks.train_step: the count of all-to-alls in graphs, the check of losses, and the fields of the JSON."""

import pytest

from benchmarks.harness import harness
from benchmarks.harness.graph_count import count_nodes
from benchmarks.train_step import __main__ as train_step
from benchmarks.train_step import phases
from tf_fusedrec import tf


def graph_of(function, *arguments):
    return function.get_concrete_function(*arguments).graph.as_graph_def()


@tf.function
def one_sine(x):
    return tf.sin(x)


def test_nodes_are_counted_once_for_every_call_of_their_function():
    @tf.function
    def three(x):
        return tf.sin(one_sine(x) + one_sine(x + 1))

    assert count_nodes(graph_of(three, tf.constant(1.0)), "Sin") == 3


def test_nodes_in_both_branches_and_in_a_loop_body_are_counted():
    @tf.function
    def loop(x):
        x = tf.cond(x > 0, lambda: tf.sin(x), lambda: tf.cos(x))
        return tf.while_loop(lambda y: y < 2, lambda y: (one_sine(y) + 1,), [x])[0]

    graph = graph_of(loop, tf.constant(1.0))
    assert count_nodes(graph, "Sin") == 2
    assert count_nodes(graph, "Cos") == 1


def test_nodes_of_functions_that_nobody_calls_are_not_counted():
    graph = graph_of(tf.function(lambda x: x + 1), tf.constant(1.0))
    graph.library.CopyFrom(graph_of(tf.function(lambda x: one_sine(x)), tf.constant(1.0)).library)
    assert len(graph.library.function) == 1
    assert count_nodes(graph, "Sin") == 0


def test_equal_losses_pass():
    train_step.check_losses({"tfra": [0.7, 0.6], "ours": [0.7, 0.6 + 1e-7]})


def test_losses_that_differ_name_variant_and_step():
    message = r"losses of ours by step against the losses of tfra: 0\.61 at \(1,\)"
    with pytest.raises(harness.CheckFailed, match=message):
        train_step.check_losses({"tfra": [0.7, 0.6], "ours": [0.7, 0.61]})


def test_losses_that_do_not_move_prove_nothing():
    with pytest.raises(harness.CheckFailed, match="do not move"):
        train_step.check_losses({"tfra": [0.7, 0.7], "ours": [0.7, 0.7]})


def test_summary_has_the_fields_that_the_readme_names():
    times = {
        "tfra": train_step.StepTimes([0.100, 0.120, 0.110], [0.080, 0.080, 0.080]),
        "tfra_fused": train_step.StepTimes([0.044, 0.044, 0.044], [0.040, 0.040, 0.040]),
        "ours": train_step.StepTimes([0.020, 0.022, 0.024], [0.020, 0.020, 0.020]),
    }
    fields = train_step.summary(times, {"tfra": 78, "tfra_fused": 4, "ours": 3})
    assert fields["ms_tfra"] == pytest.approx(110)
    assert fields["ms_tfra_fused"] == pytest.approx(44)
    assert fields["ms_ours"] == pytest.approx(22)
    assert fields["ratio_vs_tfra"] == pytest.approx(5)
    assert fields["ratio_native_vs_tfra"] == pytest.approx(5)
    assert fields["ratio_vs_tfra_fused"] == pytest.approx(2)
    assert fields["cpu_ratio_vs_tfra"] == pytest.approx(4)
    assert fields["ms_p90_ours"] == pytest.approx(23.6)
    assert fields["alltoalls_per_step"] == {"tfra": 78, "tfra_fused": 4, "ours": 3}


def test_phases_are_differences_of_three_graphs(monkeypatch):
    clock = [0.0]

    class Slow:
        """Its lookup takes 2 s, its forward pass 3 s more, the rest of its step 5 s more."""

        name = "slow"

        def __init__(self):
            self.step = lambda ids, labels: self._takes(10.0)

        def pooled(self, ids):
            return tf.py_function(lambda: self._takes(2.0), [], tf.float32)

        def loss(self, ids, labels):
            return tf.py_function(lambda: self._takes(5.0), [], tf.float32)

        @staticmethod
        def _takes(seconds):
            clock[0] += seconds
            return 0.0

    monkeypatch.setattr(phases.time, "perf_counter", lambda: clock[0])
    batches = [({"a": tf.zeros([1, 1])}, tf.zeros([1]))] * 4
    assert phases.phases_ms([Slow()], batches, warmup=1) == {
        "slow": {"lookup": 2000.0, "forward": 3000.0, "backward": 5000.0}
    }
