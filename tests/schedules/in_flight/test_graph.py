"""Dependencies in the traced steps of SemiAsync and Pipelined, and ranks whose data ends first, in one job."""

import numpy as np
import pytest

from tests.schedules import clicks
from tests.support.ranks import run_ranks
from tf_fusedrec import tf

KINDS = ("ids", "rows", "gradients")


def _fitted(schedule, batches, rank):
    """Returns the state after a fit of this number of batches with 4 samples."""
    import tf_fusedrec as fr
    from tf_fusedrec import keras

    embedding = clicks.make_embedding("Adagrad")
    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.legacy.SGD(0.05))
    model = clicks.make_model(embedding, schedule, optimizer)
    data = tf.data.Dataset.from_tensor_slices(clicks.batch(4 * batches, seed=rank)).batch(4)
    model.fit(data, epochs=2, verbose=0)
    return model, embedding, data


def _waits(ops):
    """Returns, for each kind of op in a step, the kinds of ops that it waits for."""
    from tests.support.graphs import ancestors

    kind_of = {}
    table = next(op for op in ops if op.type == "Fusedrec>TableLookup").inputs[0]
    for op in ops:
        name = op.name.rsplit("/", 1)[-1]
        if op.type == "HorovodAlltoall":
            kind_of[op] = next(kind for kind in KINDS if name.endswith(f".{kind}"))
        elif op.type == "MatMul":
            kind_of[op] = "compute"
        elif op.type.startswith("Fusedrec>Table"):
            kind_of[op] = op.type.removeprefix("Fusedrec>Table")
        elif op.type == "If" and any(tensor is table for tensor in op.inputs):
            kind_of[op] = "late update"
    waits = {kind: set() for kind in kind_of.values()}
    for op, kind in kind_of.items():
        waits[kind] |= {kind_of[earlier] for earlier in ancestors(op) if earlier in kind_of} - {kind}
    return waits


def _facts():
    import tf_fusedrec as fr
    from tf_fusedrec.schedules import Pipelined, SemiAsync

    rank, found = fr.collectives.rank(), {}
    for schedule in (SemiAsync(), Pipelined(3), Pipelined(4), Pipelined(6)):
        model, embedding, data = _fitted(schedule, [3, 1][rank], rank)
        ops = model.train_function._step.get_concrete_function(iter(data)).graph.get_operations()
        assert clicks.last_layer_reduced_early(ops), schedule
        found[str(schedule)] = _waits(ops), clicks.state(model, embedding), int(model.optimizer.iterations)
    return found


@pytest.fixture(scope="module")
def facts():
    return run_ranks(_facts, 2)


def test_compute_waits_for_no_exchange_and_no_exchange_for_compute(facts):
    late = {"SemiAsync()", "Pipelined(depth=6)"}
    for name in late | {"Pipelined(depth=4)"}:
        waits = facts[0][name][0]
        assert waits["compute"] == set(), name
        assert "compute" not in waits["ids"] | waits["rows"] | waits["Lookup"] | waits.get("late update", set()), name
    for name in late:  # the gradient exchange is inside the late update, which the lookup behind it must see
        waits = facts[0][name][0]
        assert waits["late update"] == set() and "late update" in waits["Lookup"], name
    assert facts[0]["Pipelined(depth=4)"][0]["gradients"] >= {"compute"}


def test_stages_of_other_batches_do_not_wait_for_each_other(facts):
    for name, (waits, _, _) in facts[0].items():
        assert waits["ids"] == set(), name
        assert ("ids" in waits["Lookup"] | waits["rows"]) == (name == "SemiAsync()"), name
    assert "rows" in facts[0]["Pipelined(depth=3)"][0]["compute"]  # fresh rows of the batch itself


def test_a_rank_whose_data_ends_first_takes_part_with_nothing(facts):
    for name in facts[0]:
        (_, mine, steps), (_, other, steps_of_other) = (result[name] for result in facts)
        assert steps == steps_of_other == 6, name
        for what in mine:
            if what.startswith("dense") and mine[what].ndim:
                np.testing.assert_array_equal(mine[what], other[what], err_msg=f"{name}: {what}")
        # Every row of both ranks trained, so each sample was used.
        ids = np.concatenate([state["user ids"] for state in (mine, other)])
        seen = np.concatenate([clicks.batch(4 * n, seed=rank)[0]["user"] for rank, n in enumerate((3, 1))])
        assert set(ids) == set(seen), name
        moved = np.concatenate([state["user accumulator"] for state in (mine, other)])
        assert (moved > np.float32(0.1)).any(axis=1).all(), name
