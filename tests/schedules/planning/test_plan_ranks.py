"""The forecast of bytes agrees with the counters of a run on two ranks."""

import pytest

import tf_fusedrec as fr
from tests.schedules.planning.models import make_batch, make_model
from tests.support.ranks import run_ranks
from tf_fusedrec.schedules import FrozenWindow, Nested, Sync

STEPS = 3


CASES = [(Sync(), None), (FrozenWindow(2), None), (Nested(2), "bfloat16")]


def sent_bytes():
    """Body: returns by case the bytes of ids, rows and gradients that this rank sends per step, the mean over steps.

    Ranks have the same sample; the case "others" is Sync() with other batches of the same kind.
    """
    found = {}
    for case in CASES:
        schedule, wire_dtype = case
        model, embedding = make_model(schedule=schedule, wire_dtype=wire_dtype)
        sent = [0]
        for seed in (0, fr.rank()) if case == CASES[0] else (0,):
            model.fit(fr.tf.data.Dataset.from_tensors(make_batch(seed)).repeat(STEPS), verbose=0)
            sent.append(sum(int(group.traffic.numpy()[2]) for group in embedding.internals.groups))
        found[case] = sent[1] / STEPS
        if case == CASES[0]:
            found["others"] = (sent[2] - sent[1]) / STEPS
    return found


@pytest.fixture(scope="module")
def counted():
    """The mean over ranks."""
    one, two = run_ranks(sent_bytes, 2)
    return {case: (one[case] + two[case]) / 2 for case in one}


@pytest.fixture(scope="module")
def forecasts():
    model, _ = make_model()
    found = fr.plan(model, make_batch(), fr.Cluster(2, 1e9), micro_batches=[2], tolerate=["bfloat16_wire"])
    return [one for one in found.forecasts if one.topology.groups == 1]


@pytest.mark.parametrize(("schedule", "wire_dtype"), CASES, ids=str)
def test_bytes_are_those_of_two_ranks(schedule, wire_dtype, forecasts, counted):
    (forecast,) = [one for one in forecasts if (one.schedule, one.wire_dtype) == (schedule, wire_dtype)]
    # Ranks with the sample itself send exactly as much, in the mean over ranks, because the owners of ids cancel out.
    # A look-ahead routes one empty batch behind the last one: the counts of 3 tables for each micro-batch.
    behind = 8 * 3 * schedule.stages.pieces / STEPS if schedule.stages.read else 0
    # Marks of micro-batches come in whole words for each owner, and the forecast has parts of words.
    words = 8 * 3 if schedule.stages.pieces > 1 else 0
    sent = counted[schedule, wire_dtype]
    assert sent == pytest.approx(forecast.embedding_bytes + behind, rel=0, abs=1 + words)


def test_bytes_of_other_batches_of_the_same_kind_are_within_5_percent(forecasts, counted):
    (forecast,) = [one for one in forecasts if (one.schedule, one.wire_dtype) == (Sync(), None)]
    assert counted["others"] == pytest.approx(forecast.embedding_bytes, rel=0.05)
