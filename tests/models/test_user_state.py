"""Requests against states of a GRM answer as the model does on whole histories; what cannot be kept is refused.

test_kept_states.py asks exports, with every encoder of retrieval models.
"""

import dataclasses

import numpy as np
import pytest

from tests.layers.cases import cuts
from tests.models import experiments
from tests.models.batches import ranking_batch
from tests.models.ranking.exposure_oracle import make
from tf_fusedrec import tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.models.build import columns, make_embedding, make_model, no_rows
from tf_fusedrec.models.experiment import from_dict
from tf_fusedrec.models.experiment.model_config import GRMConfig
from tf_fusedrec.models.grm import GRM
from tf_fusedrec.models.user_state import GRMStates

CONFIG = GRMConfig(
    contextual=("user_id", "user_budget"), causal_context=True, max_history=30, max_exposures=9, dim=8, qk_dim=4,
    value_dim=4, num_experts=3, expert_units=8, head_units=4,
)  # fmt: skip
HISTORIES, EXPOSURES = [12, 0, 30, 1, 5], [3, 2, 9, 1, 0]


def make_grm(**options):
    model = make(GRM, dataclasses.replace(CONFIG, **options))
    model(ranking_batch([1], [1]))
    return model


def piece(batch, begin, end, of_exposures=True):
    """Returns events [begin[b], end[b]) of each user b, and all candidates or none."""

    def part(name, column):
        if name.startswith("history_"):
            cut = [tf.constant(n, tf.int64) for n in (begin, end - begin, column.row_lengths().numpy() - end)]
            return jagged.split(column, cut)[1]
        return jagged.last(column, 9 if of_exposures else 0) if name.startswith("exposed_") else column

    return {name: part(name, column) for name, column in batch.items()}


def assert_near(got, want):
    """Float32 sums in another order, in two blocks and the layers behind them."""
    for task, logits in want.items():
        np.testing.assert_allclose(got[task], logits, rtol=0, atol=2e-6, err_msg=task)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"contextual": (), "time_buckets": 0}], ids=["all", "no_context_and_time"])
def test_grm_answers_as_on_whole_histories(options):
    model = make_grm(**options)
    states, batch = GRMStates(model), ranking_batch(HISTORIES, EXPOSURES)
    state, places = states.none(5), cuts(HISTORIES, 1)
    for number, (begin, end) in enumerate(zip(places, places[1:])):
        logits, state = states.update(piece(batch, begin, end, of_exposures=number % 2), state)
        if number % 2:
            assert_near(logits, model(piece(batch, begin * 0, end)))
    logits, _ = states.update(piece(batch, end, end), state)  # No new event.
    assert_near(logits, model(batch))


def test_requests_add_no_rows():
    model_fields = {**experiments.RANKING["model"], "causal_context": True}
    experiment = from_dict({**experiments.RANKING, "model": model_fields})
    model = make_model(experiment, make_embedding(experiment), np.arange(1, 3), np.ones(2, np.int64))
    model(no_rows(columns(experiment.model, "train")))
    states, batch = GRMStates(model), ranking_batch([3], [2])
    states.update({**batch, "user_budget": tf.zeros([1], tf.int64)}, states.none(1))
    assert [len(model.embedding.export_table(table.name)[0]) for table in model.embedding.tables] == [0] * 3


@pytest.mark.slow
def test_context_that_sees_the_history():
    """Its states take candidates only."""
    model = make_grm(causal_context=False)
    with pytest.raises(ValueError, match=r"the 2 context tokens see all events.*causal_context: tr"):
        GRMStates(model)
    with pytest.raises(ValueError, match="group_norm is True: a state keeps no normalised tokens"):
        GRMStates(make_grm(group_norm=True))
    with pytest.raises(ValueError, match="cross_layers is 1: the crosses take the context of the user"):
        GRMStates(make_grm(cross_layers=1))
    states, batch = GRMStates(model, new_events=False), ranking_batch(HISTORIES, EXPOSURES)
    history = np.array(HISTORIES)
    _, state = states.update(piece(batch, history * 0, history, of_exposures=False), states.none(5))
    assert_near(states.update(piece(batch, history, history), state)[0], model(batch))
    with pytest.raises(tf.errors.InvalidArgumentError, match="a state with context takes targets only, got new events"):
        states.update(piece(batch, history - (history == 5), history), state)
    with pytest.raises(ValueError, match="piece must be >= 1, got 0"):
        states.answer_in_pieces(batch, state, 0)
