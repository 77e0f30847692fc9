"""In the traced step of FrozenWindow, exchanges wait for no compute, and compute waits for the previous piece."""

import pytest

from tests.schedules import clicks
from tests.support.ranks import run_ranks

M = 3


def _facts():
    """Body: returns the facts for the tests below from a model's step on any number of processes."""
    import tf_fusedrec as fr
    from tests.support.graphs import ancestors, count_ops, reduced_in_between
    from tf_fusedrec import keras
    from tf_fusedrec.schedules import FrozenWindow

    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.legacy.Adam(0.01))
    model = clicks.make_model(clicks.make_embedding(), FrozenWindow(M), optimizer)
    step = clicks.train_function(model).get_concrete_function()
    ops = step.graph.get_operations()  # in the order of the program
    lookups = [op for op in ops if op.type == "Fusedrec>TableLookup"]
    sums = [op for op in ops if op.type == "Fusedrec>TableAccumulateGradients"]
    buffers = [op for op in ops if op.type in ("Pad", "PadV2")]
    products = [op for op in ops if op.type == "MatMul"]
    compute = [products[i : i + len(products) // M] for i in range(0, len(products), len(products) // M)]
    exchanges = {
        kind: [op for op in ops if op.type == "HorovodAlltoall" and _name(op).endswith(f".{kind}")]
        for kind in ("ids", "rows", "gradients")
    }
    collectives = [op for op in ops if op.type in ("HorovodAlltoall", "HorovodAllreduce")]
    before = {op: ancestors(op) for op in [*products, *lookups, *sums, *collectives]}
    # All-reduces of gradients. That of the number of samples depends on the data alone.
    dense = [op for op in collectives if op.type == "HorovodAllreduce" and before[op] & set(products)]

    def waits(op):
        return [i for i, piece in enumerate(compute) if before[op] & set(piece)]

    return {
        "matmuls": [len(piece) for piece in compute],
        "exchanges": {kind: [_name(op) for op in found] for kind, found in exchanges.items()},
        "lookup_waits_for": [waits(op) for op in lookups],
        "compute_waits_for_lookups": [sum(lookup in before[op] for lookup in lookups) for op in compute[0]],
        "compute_waits_for_rows": [sum(rows in before[op] for rows in exchanges["rows"]) for op in compute[0]],
        "reduced_early": fr.collectives.size() == 1 or clicks.last_layer_reduced_early(ops),
        "reduced_in_between": reduced_in_between(ops),
        "compute_waits_for_buffers": [sum(buffer in before[op] for buffer in buffers) for op in compute[0]],
        "sums_wait_for": [waits(op) for op in sums],
        "sums_wait_for_sums": [sum(other in before[op] for other in sums) for op in sums],
        "reduces_wait_for_gradients": [set(exchanges["gradients"][-1:]) <= before[op] for op in dense],
        "rows_wait_for": [waits(op) for op in exchanges["rows"]],
        "rows_wait_for_rows": [[other in before[op] for other in exchanges["rows"]] for op in exchanges["rows"]],
        "gradients_wait_for": [waits(op) for op in exchanges["gradients"]],
        "compute_waits_for": [
            [i for i, piece in enumerate(compute) if i != j and all(set(piece) <= before[op] for op in mine)]
            for j, mine in enumerate(compute)
        ],
        "compute_depends_on": [sorted({i for op in mine for i in waits(op)} - {j}) for j, mine in enumerate(compute)],
        "ops": {kind: n for kind, n in count_ops(step).items() if kind.startswith("Fusedrec>Table")},
    }


def _name(op):
    return op.name.rsplit("/", 1)[-1]


@pytest.fixture(scope="module", params=[1, 2])
def facts(request):
    return request.param, run_ranks(_facts, request.param)[0]


def test_exchanges_wait_for_no_compute(facts):
    ranks, seen = facts
    assert seen["lookup_waits_for"] == [[]]
    assert seen["rows_wait_for"] == [[]] * M * (ranks > 1)


def test_rows_leave_when_the_rows_of_the_micro_batches_before_have_arrived(facts):
    ranks, seen = facts
    assert seen["rows_wait_for_rows"] == [[j < i for j in range(M)] for i in range(M)] * (ranks > 1)


def test_compute_goes_one_micro_batch_after_another(facts):
    _, seen = facts
    assert min(seen["matmuls"]) == max(seen["matmuls"]) >= 4  # forward and backward
    wanted = [list(range(j)) for j in range(M)]
    assert seen["compute_waits_for"] == seen["compute_depends_on"] == wanted


def test_gradients_leave_when_their_compute_is_done(facts):
    ranks, seen = facts
    assert seen["gradients_wait_for"] == ([list(range(j + 1)) for j in range(M)] if ranks > 1 else [])


def test_compute_begins_behind_the_lookup_and_its_own_rows(facts):
    ranks, seen = facts
    assert set(seen["compute_waits_for_lookups"]) == {1}
    assert set(seen["compute_waits_for_rows"]) == {int(ranks > 1)}
    assert set(seen["compute_waits_for_buffers"]) == {1}


def test_gradients_are_summed_in_order_when_they_arrive(facts):
    _, seen = facts
    assert seen["sums_wait_for"] == [list(range(j + 1)) for j in range(M)]
    assert seen["sums_wait_for_sums"] == list(range(M))


def test_dense_all_reduces_follow_the_last_gradients_of_rows(facts):
    ranks, seen = facts
    assert seen["reduced_early"] and not seen["reduced_in_between"]
    assert set(seen["reduces_wait_for_gradients"]) == ({True} if ranks > 1 else set())


def test_counts_of_exchanges_lookups_and_updates(facts):
    ranks, seen = facts
    for kind, names in seen["exchanges"].items():
        assert len(names) == len(set(names)) == (1 if kind == "ids" else M) * (ranks > 1)
    assert seen["ops"] == {
        "Fusedrec>TableLookup": 1, "Fusedrec>TableAccumulateGradients": M, "Fusedrec>TableApplyAccumulated": 1,
    }  # fmt: skip
