"""Topology(average_late=True) on 4 processes: the order of a traced step, the end of the data, evaluation, resumption.

tests/exchange/test_ranks.py and tests/schedules/test_matrix.py compare the numbers with oracles.
"""

import time

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.schedules import clicks
from tests.support.graphs import ancestors
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec.exchange.collectives import ALL_TO_ALLS, SUMS
from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules.model import make_optimizer_slots

RANKS, SAMPLES = 4, 4
LATE = Topology(2, "weight_sync", average_late=True)
FEATURES = ("item", "user")
STEPS_OF_RANK = (5, 3, 0, 5)


def _model(name, schedule="sync"):
    embedding = clicks.make_embedding("Adam", topology=LATE, name=name)
    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01))
    return clicks.make_model(embedding, schedule, optimizer, FEATURES), embedding


def _data(sizes, first=0):
    """A data set of batches with these numbers of samples, of this rank."""

    def of_step(step, size):
        x, y, weight = clicks.batch(SAMPLES, 100 * (first + step) + fr.rank())
        return {name: x[name][:size] for name in FEATURES}, y[:size], weight[:size]

    batches = [of_step(step, size) for step, size in enumerate(sizes)]
    signature = ({name: clicks.SIGNATURE[0][name] for name in FEATURES}, *clicks.SIGNATURE[1:])
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)


def _functions_of(op):
    graph = op.graph
    return [graph._get_function(op.get_attr(branch).name).graph for branch in ("then_branch", "else_branch")]


def _waits(model):
    """Returns what each part of a traced step must wait for, by kinds of ops."""
    make_optimizer_slots(model)
    step = tf.function(lambda *data: model.train_step(data), autograph=False)
    signature = ({name: clicks.SIGNATURE[0][name] for name in FEATURES}, *clicks.SIGNATURE[1:])
    ops = step.get_concrete_function(*signature).graph.get_operations()

    def kind(op):
        if op.type in ("If", "StatelessIf"):
            inside = {one.type for graph in _functions_of(op) for one in graph.get_operations()}
            parts = {"read": ["Fusedrec>TableTakeUnsynced"], "merge": ["Fusedrec>TableMerge"], "mean": SUMS}
            for part, kinds in parts.items():
                if inside & set(kinds):
                    return part
        if op.type in ALL_TO_ALLS:
            return op.name.rpartition(".")[2].rpartition("_")[2] or op.name
        if op.type in ("MatMul", "Tanh", "TanhGrad") or op.type.startswith("ResourceApply"):
            return "dense"
        return op.type.partition(">")[2] if op.type.startswith("Fusedrec>Table") else None

    kinds = {op: kind(op) for op in ops if kind(op) is not None}
    waits = {}
    for op, what in kinds.items():
        waits.setdefault(what, []).append({kinds[other] for other in ancestors(op) if other in kinds})
    return waits


def _state(model, embedding):
    """The trained state without slots of the optimizer, which Keras lists in another order behind a load."""
    dense = {f"dense {i}": weight.numpy() for i, weight in enumerate(model.trainable_weights)}
    return {**dense, **clicks.records(embedding)}


def _evaluated(model, embedding):
    """Returns the records after three steps, after an evaluation, and after two more steps."""
    train, iterator = model.make_train_function(), iter(_data([SAMPLES] * 6))
    for _ in range(3):
        train(iterator)
    before = clicks.records(embedding)
    model.evaluate(_data([SAMPLES], 50), verbose=0)
    between = clicks.records(embedding)
    for _ in range(2):
        train(iterator)
    model.drain()
    return before, between, clicks.records(embedding)


def _all(folder):
    """Body: two models serve all tests, because every trace costs more than its steps."""
    steps = STEPS_OF_RANK[fr.rank()]
    uneven = [SAMPLES] * steps
    one, other = _model("late"), _model("late")
    found = {"waits": _waits(one[0]), "evaluated": _evaluated(*one)}
    fr.checkpoint.save(folder, one[0], one[0].optimizer)
    fr.checkpoint.load(folder, other[0], other[0].optimizer)
    for name, of_one, of_other in (
        ("resumed", [SAMPLES] * 3, [SAMPLES] * 3),
        ("uneven", uneven, uneven + [0] * (max(STEPS_OF_RANK) - steps)),
    ):
        states = []
        for (model, embedding), sizes in ((one, of_one), (other, of_other)):
            if name == "uneven":
                fr.checkpoint.load(folder, model, model.optimizer)
            model.fit(_data(sizes, 5), epochs=2, verbose=0)
            states.append(_state(model, embedding))
        found[name] = states
    return found


def _leave_horovod(last_call):
    """Ends Horovod right behind a call whose last exchange two of the ranks begin two seconds late."""
    import horovod.tensorflow as hvd

    class Late(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            time.sleep(2.0 * (hvd.rank() in (1, 3)))

        def on_predict_batch_begin(self, batch, logs=None):
            time.sleep(2.0 * (hvd.rank() >= 2))

    model, _ = _model("left")
    steps = {"steps_per_epoch": 1} if last_call == "fit" else {"steps": 1}
    getattr(model, last_call)(_data([SAMPLES] * 2), **steps, verbose=0, callbacks=[Late()])
    hvd.shutdown()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # A ring's order of additions depends on the place in the buffer, so tensors must not share one.
        patch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
        folder = str(tmp_path_factory.mktemp("checkpoint") / "c")
        return run_ranks(_all, RANKS, timeout_s=480, topologies=[LATE], folder=folder)


def _replicas(results, of):
    """Pairs of what both replicas of a shard have."""
    return [[of(results[rank]) for rank in ranks] for ranks in LATE.sets(RANKS)[1]]


def test_no_dense_op_and_no_row_waits_for_the_mean(results):
    waits = results[0]["waits"]
    assert {"read", "mean", "merge", "dense", "rows", "gradients", "TableLookup", "TableApplyGradients"} <= set(waits)
    for what in ("dense", "rows", "gradients", "TableLookup"):
        for before in waits[what]:
            assert not before & {"read", "mean", "merge"}, what
    for before in [*waits["read"], *waits["mean"]]:  # so they run beside the dense compute
        assert "TableLookup" in before and not before & {"dense", "rows", "gradients"}
    for before in waits["TableApplyGradients"]:
        assert "read" in before and "mean" not in before
    assert all({"read", "mean", "TableApplyGradients", "gradients"} <= before for before in waits["merge"])


def test_the_end_of_the_data_is_as_empty_batches_and_the_end_of_fit_makes_replicas_equal(results):
    for result in results:
        clicks.assert_same(*result["uneven"])
    for one, two in _replicas(results, lambda result: result["uneven"][0]):
        assert len(one["item ids"]) > 2
        clicks.assert_same(one, two)


def test_an_evaluation_makes_replicas_equal_and_training_goes_on(results):
    for place, equal in ((0, False), (1, True), (2, True)):
        same = [
            all(np.array_equal(one[what], two[what]) for what in one)
            for one, two in _replicas(results, lambda result, place=place: result["evaluated"][place])
        ]
        assert all(same) == equal, place


def test_a_run_that_resumes_goes_on_as_the_run_that_was_saved(results):
    for result in results:
        clicks.assert_same(*result["resumed"], but=("updated",))


@pytest.mark.parametrize("last_call", ["fit", "predict"])
def test_a_rank_that_leaves_horovod_behind_its_last_call_aborts_no_other(last_call):
    run_ranks(_leave_horovod, RANKS, topologies=[LATE], last_call=last_call)
