"""What each op of a traced step waits for under every schedule, and ranks whose data ends first: one job."""

from collections import Counter

import numpy as np
import pytest

from tests.schedules import clicks
from tests.support.graphs import ancestors, count_ops, reduced_in_between
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.collectives import ALL_TO_ALLS, SUMS
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, SemiAsync, Sync

M = 3
WINDOW, AHEAD = (FrozenWindow(M),), (DualBuffer(), Nested(2))
LATE, IN_FLIGHT = (SemiAsync(), Pipelined(6)), (SemiAsync(), Pipelined(3), Pipelined(4), Pipelined(6))
EXCHANGES = ("ids", "rows", "gradients")
EVERY = (*EXCHANGES, "compute", "Lookup", "Apply", "late update")

# Schedules, op, ops that it must wait for, ops that it must not wait for. "rows 1" belongs to micro-batch 1, "rows" to
# any.
RULES = [
    # The next batch waits for no compute. It waits for the refresh of this one, or few threads could work on its ids
    # before the op that this batch's rows need.
    (AHEAD, "ids", ("Refresh",), ("compute",)),
    (AHEAD, "SegmentUnique", ("Refresh",), ()),
    (AHEAD, "LookAhead", (), ("compute", "Apply")),
    # Rows leave when they are refreshed, those of a first micro-batch before. The look-ahead precedes the update, so
    # updated rows are newer.
    ((DualBuffer(),), "rows", ("Refresh",), ("compute",)),
    ((Nested(2),), "rows 0", ("Read",), ("Refresh", "compute")),
    ((Nested(2),), "rows 1", ("Refresh",), ("compute",)),
    (AHEAD, "Apply", ("LookAhead",), ()),
    (WINDOW, "Lookup", (), ("compute",)),
    *[
        rule
        for i in range(M)
        for before, behind in [(range(i), range(i + 1, M))]
        for rule in (
            # Rows leave when the rows of the micro-batches before have arrived, and wait for no compute.
            (WINDOW, f"rows {i}", [f"rows {j}" for j in before], ["compute", *(f"rows {j}" for j in behind)]),
            (
                WINDOW,
                f"compute {i}",
                ["Lookup" if i else "Read", f"rows {i}", *(f"compute {j}" for j in before)],
                [*([] if i else ["Lookup"]), *(f"{kind} {j}" for j in behind for kind in ("rows", "compute"))],
            ),
            # Gradients leave when their compute is done, and train their rows in order.
            (WINDOW, f"gradients {i}", [f"compute {i}"], [f"compute {j}" for j in behind]),
            (
                WINDOW,
                f"ApplyGradients {i}",
                [f"gradients {i}", *(f"ApplyGradients {j}" for j in before)],
                [f"{kind} {j}" for j in behind for kind in ("compute", "ApplyGradients")],
            ),
        )
    ],
    (WINDOW, "reduce", ("compute",), ("gradients",)),
    ((*LATE, Pipelined(4)), "compute", (), EVERY),
    *[((*LATE, Pipelined(4)), op, (), ("compute",)) for op in ("ids", "rows", "Lookup")],
    # The gradient exchange is inside the late update, which the lookup behind it must see.
    (LATE, "late update", (), EVERY),
    (LATE, "Lookup", ("late update",), ()),
    ((Pipelined(4),), "gradients", ("compute",), ()),
    # Stages of other batches do not wait for each other.
    (IN_FLIGHT, "ids", (), EVERY),
    ((SemiAsync(),), "rows", ("ids",), ()),
    *[(IN_FLIGHT[1:], op, (), ("ids",)) for op in ("rows", "Lookup")],
    ((Pipelined(3),), "compute", ("rows",), ()),  # fresh rows of the batch itself
]


def _named(ops, micro_batches):
    """Returns {op: name} of the ops that RULES name, numbered by kind in the order of the program."""
    products = [op for op in ops if op.type == "MatMul"]
    table = next(op.inputs[0] for op in ops if op.type == "Fusedrec>TableLookup")
    names, counts = {}, {}
    for op in ops:
        if op.type in ALL_TO_ALLS:
            kind = op.name.rpartition(".")[2]
        elif op.type in SUMS and ancestors(op) & set(products):  # not that of the number of samples
            kind = "reduce"
        elif op.type.startswith("Fusedrec>Table"):
            kind = op.type.removeprefix("Fusedrec>Table")
            kind = "Refresh" if kind == "Lookup" and op.get_attr("N") else kind  # after a look-ahead
        elif op.type in ("Fusedrec>SegmentUnique", "Fusedrec>PartialSums"):  # the latter, where owners may return sums
            kind = "SegmentUnique"
        elif op.type == "If" and any(tensor is table for tensor in op.inputs):
            kind = "late update"
        else:
            continue
        names[op] = f"{kind} {counts.setdefault(kind, 0)}"
        counts[kind] += 1
    assert products and len(products) % micro_batches == 0
    names.update({op: f"compute {i * micro_batches // len(products)}" for i, op in enumerate(products)})
    return names


def _trained():
    """Body: by schedule, the waits and counts of ops in the step, and the state and steps of two epochs."""
    import tf_fusedrec as fr

    collectives._engine.joined_bytes = 0  # gradients travel one by one, as large ones do
    rank, found = fr.rank(), {}
    for schedule in (Sync(), *WINDOW, *AHEAD, *IN_FLIGHT):
        embedding = clicks.make_embedding("Adagrad")
        optimizer = fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.05))
        model = clicks.make_model(embedding, schedule, optimizer)
        data = tf.data.Dataset.from_tensor_slices(clicks.batch(4 * [3, 1][rank], seed=rank)).batch(4)
        model.fit(data, epochs=2, verbose=0)
        step = model.train_function._step.get_concrete_function(iter(data))
        ops = step.graph.get_operations()
        names = _named(ops, schedule.stages.pieces)
        found[schedule] = {
            "waits": [
                (name, Counter(names[other] for other in ancestors(op) if other in names)) for op, name in names.items()
            ],
            "names": Counter(names.values()),
            "tables": {kind: n for kind, n in count_ops(step).items() if kind.startswith("Fusedrec>Table")},
            "reduced early": clicks.last_layer_reduced_early(ops),
            "reduced in between": reduced_in_between(ops),
            "state": clicks.state(model, embedding),
            "steps": int(model.optimizer.iterations),
        }
    return found


@pytest.fixture(scope="module")
def results():
    return run_ranks(_trained, 2)


def _is(name, wanted):
    return name == wanted or name.rpartition(" ")[0].startswith(wanted)


def test_ops_wait_for_what_they_must_and_for_nothing_else(results):
    for schedules, op, must, must_not in RULES:
        for schedule in schedules:
            facts = results[0][schedule]
            of_op = [(name, waits) for name, waits in facts["waits"] if _is(name, op)]
            assert of_op, f"{schedule} has no {op} among {facts['names']}"
            for own, waits in of_op:
                for wanted in must:
                    others = [name for name in facts["names"] if _is(name, wanted)]
                    assert others, f"{schedule} has no {wanted}"
                    # Compute begins behind all of an earlier compute. A gradient needs only a part of its own.
                    missing = [
                        name for name in others if waits[name] < (facts["names"][name] if "compute" in op else 1)
                    ]
                    assert not missing, f"{schedule}: {op} does not wait for {missing}"
                wrong = [name for name in waits for unwanted in must_not if _is(name, unwanted) and name != own]
                assert not wrong, f"{schedule}: {op} waits for {wrong}"


def test_counts_of_exchanges_lookups_and_updates(results):
    for schedule in (*WINDOW, *AHEAD):
        names = results[0][schedule]["names"]
        pieces = schedule.stages.pieces
        of_kind = {kind: [name for name in names if _is(name, kind)] for kind in (*EXCHANGES, "Refresh", "LookAhead")}
        ahead = int(schedule in AHEAD)
        assert {kind: len(found) for kind, found in of_kind.items()} == {
            "ids": 1, "rows": pieces, "gradients": pieces, "Refresh": ahead, "LookAhead": ahead,
        }, schedule  # fmt: skip
    assert results[0][FrozenWindow(M)]["tables"] == {
        "Fusedrec>TableRead": 1, "Fusedrec>TableLookup": 1, "Fusedrec>TableApplyGradients": M,
    }  # fmt: skip


def test_dense_gradients_are_averaged_as_they_become_ready(results):
    for schedule, facts in results[0].items():
        assert facts["reduced early"] and not facts["reduced in between"], schedule


def test_a_rank_whose_data_ends_first_takes_part_with_nothing(results):
    for schedule in results[0]:
        one, other = (result[schedule] for result in results)
        assert one["steps"] == other["steps"] == 6, schedule
        for what, mine in one["state"].items():
            if what.startswith("dense") and mine.ndim:
                np.testing.assert_array_equal(mine, other["state"][what], err_msg=f"{schedule}: {what}")
        # Every row of both ranks trained, so each sample was used.
        ids = np.concatenate([of["state"]["user ids"] for of in (one, other)])
        seen = np.concatenate([clicks.batch(4 * n, seed=rank)[0]["user"] for rank, n in enumerate((3, 1))])
        assert set(ids) == set(seen), schedule
        moved = np.concatenate([of["state"]["user accumulator"] for of in (one, other)])
        assert (moved > np.float32(0.1)).any(axis=1).all(), schedule
