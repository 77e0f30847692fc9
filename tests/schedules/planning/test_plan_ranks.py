"""The forecast of bytes agrees with the counters of a run on two ranks."""

import pytest

import tf_fusedrec as fr
from tests.schedules.planning.models import make_batch, make_model
from tests.support.ranks import run_ranks
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Sync

STEPS = 3


def sent_bytes(schedule, wire_dtype, seed_of_rank):
    """Body: returns the bytes of ids, rows and gradients that this rank sends per step, the mean over steps."""
    model, embedding = make_model(schedule=schedule, wire_dtype=wire_dtype)
    features, labels = make_batch(seed_of_rank * fr.rank())
    data = fr.tf.data.Dataset.from_tensors((features, labels)).repeat(STEPS)
    model.fit(data, verbose=0)
    return sum(int(lookup.traffic.numpy()[2]) for lookup in embedding.lookups) / STEPS


@pytest.fixture(scope="module")
def forecasts():
    model, _ = make_model()
    found = fr.plan(model, make_batch(), fr.Cluster(2, 1e9), micro_batches=[4], tolerate=["bfloat16_wire"])
    return [one for one in found.forecasts if one.topology.groups == 1]


@pytest.mark.parametrize(
    ("schedule", "wire_dtype"),
    [(Sync(), None), (Sync(), "bfloat16"), (FrozenWindow(4), None), (DualBuffer(), None), (Nested(4), "bfloat16")],
    ids=str,
)
def test_bytes_are_those_of_two_ranks(schedule, wire_dtype, forecasts):
    (forecast,) = [one for one in forecasts if (one.schedule, one.wire_dtype) == (schedule, wire_dtype)]
    # Ranks with the sample itself send exactly as much, in the mean over ranks, because the owners of ids cancel out.
    counted = run_ranks(sent_bytes, 2, schedule=schedule, wire_dtype=wire_dtype, seed_of_rank=0)
    # A look-ahead routes one empty batch behind the last one: the counts of 3 tables for each micro-batch.
    behind = 8 * 3 * getattr(schedule, "micro_batches", 1) / STEPS if schedule.looks_ahead else 0
    # Marks of micro-batches come in whole words for each owner, and the forecast has parts of words.
    words = 8 * 3 if getattr(schedule, "micro_batches", 1) > 1 else 0
    assert sum(counted) / 2 == pytest.approx(forecast.embedding_bytes + behind, rel=0, abs=1 + words)


def test_bytes_of_other_batches_of_the_same_kind_are_within_5_percent(forecasts):
    (forecast,) = [one for one in forecasts if (one.schedule, one.wire_dtype) == (Sync(), None)]
    counted = run_ranks(sent_bytes, 2, schedule=Sync(), wire_dtype=None, seed_of_rank=1)
    assert sum(counted) / 2 == pytest.approx(forecast.embedding_bytes, rel=0.05)
