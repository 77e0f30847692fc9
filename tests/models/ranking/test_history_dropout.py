"""history_dropout leaves events out of every ranking model's history in training, and nothing else."""

import numpy as np
import pytest

from models.dcn import DCN
from models.din import DIN
from models.dlrm import DLRM
from models.experiment.model_config import DCNConfig, DINConfig, DLRMConfig, GRMConfig
from models.grm import GRM
from tests.models.batches import ragged
from tests.models.ranking import exposure_oracle as oracle

MODELS = [(GRM, GRMConfig), (DLRM, DLRMConfig), (DIN, DINConfig), (DCN, DCNConfig)]


def test_a_step_leaves_events_out_of_the_history_and_keeps_what_the_exposures_show():
    batch = oracle.batch_of([12, 0, 12], [2, 1, 3])
    batch["history_rating"] = ragged([12, 0, 12], np.arange(24), np.float32)
    given = {**oracle.FIELDS, "item_features": (), "history_dense": ("rating",), "history_dropout": 0.5}
    model = oracle.make(DLRM, DLRMConfig(**given))
    whole, rows, numbers = model.read(batch, training=False)
    assert whole is batch
    np.testing.assert_array_equal(numbers.exposed, model.dense_of(batch).exposed)
    cut, fewer, left = model.read(batch, training=True)
    lengths = cut["history_item"].row_lengths().numpy()
    assert lengths[1] == 0 and 0 < lengths.sum() < 24
    at = left.history.values.numpy()[:, 0].round().astype(int)  # the statistics are those of no data: mean 0
    assert list(at) == sorted(set(at)) and [(at < 12).sum(), (at >= 12).sum()] == [lengths[0], lengths[2]]
    for name in ("history_item", "history_time"):
        np.testing.assert_array_equal(cut[name].values, batch[name].values.numpy()[at])
    for name in ("history_item", "history_action"):
        np.testing.assert_array_equal(fewer[name].values, rows[name].values.numpy()[at])
        np.testing.assert_array_equal(fewer[name].row_lengths(), lengths)
    np.testing.assert_array_equal(left.exposed, numbers.exposed)  # with the length of the whole history
    np.testing.assert_array_equal(fewer["exposed_item"].values, rows["exposed_item"].values)


@pytest.mark.parametrize(("model", "config"), MODELS)
def test_every_model_trains_on_fewer_events_and_answers_from_all(model, config):
    batch = oracle.batch_of([12, 12], [2, 2])
    answers = []
    for share in (0.0, 0.5):
        one = oracle.make(model, config(**oracle.FIELDS, history_dropout=share))
        answers += [one(batch, training=training)["ctr"] for training in (False, True)]
    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_array_equal(answers[0], answers[2])
    assert (answers[2].numpy() != answers[3].numpy()).all()
