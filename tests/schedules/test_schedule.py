"""Schedules are records with names: their arguments, their texts, saved models, and the models that they refuse."""

import dataclasses

import numpy as np
import pytest

from tests.schedules import clicks
from tests.schedules.ahead import RouteAhead
from tf_fusedrec import Limits, keras, tf
from tf_fusedrec.schedules import (
    DualBuffer,
    FrozenWindow,
    Nested,
    Pipelined,
    PipelinedModel,
    Schedule,
    SemiAsync,
    Sync,
    register,
)
from tf_fusedrec.schedules.schedule import get, serialize

# By text, as in configurations.
PRESETS = {
    "sync": Sync(),
    "frozen_window(3)": FrozenWindow(3),
    "frozen_window": FrozenWindow(4),
    "dual_buffer": DualBuffer(),
    "dual_buffer(lead=3)": DualBuffer(3),
    "nested(8)": Nested(8),
    "nested(2, lead=2)": Nested(2, 2),
    "semi_async": SemiAsync(),
    "pipelined(4)": Pipelined(4),
}
STALE = (SemiAsync(), Pipelined(6))


@register("tests>skipping")
@dataclasses.dataclass(frozen=True)
class Skipping(Schedule):
    """Trains whole batches, and has a number as option."""

    every: int = 1

    def train_step(self, model, data):
        return keras.Model.train_step(model, data)


def functional(schedule):
    """A model without tables."""
    x = keras.Input([3])
    model = PipelinedModel(x, keras.layers.Dense(1)(x), schedule=schedule)
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("text", PRESETS)
def test_presets_come_back_from_their_text_and_from_the_config_of_their_model(text):
    assert get(text) == PRESETS[text] == get(serialize(PRESETS[text]))
    model = functional(text)
    assert type(model).from_config(model.get_config()).schedule == PRESETS[text]


def test_a_users_schedule_is_saved_with_its_model_and_loaded(tmp_path):
    model = functional(Skipping(3))
    assert model.get_config()["schedule"] == {"name": "tests>skipping", "config": {"every": 3}}
    model.fit(np.ones([4, 3]), np.zeros([4]), verbose=0)
    model.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").schedule == Skipping(3) == get("tests>skipping(3)")


def test_names_belong_to_one_class_and_name_schedules_only():
    assert register("tests>skipping")(Skipping) is Skipping  # a notebook's cell runs twice
    with pytest.raises(ValueError, match=r"the name 'sync' for Skipping, and tf_fusedrec.*Sync has it"):
        register("sync")(Skipping)
    with pytest.raises(TypeError, match="takes a subclass of schedules.Schedule"):
        register("tests>number")(int)

    class Unnamed(Skipping):
        pass

    with pytest.raises(ValueError, match=r"class .*Unnamed is not registered.*@tf_fusedrec.schedules.register"):
        functional(Unnamed()).get_config()


@pytest.mark.parametrize("schedule", ["gone", "nested(2, lead)", None, 4, {"name": "gone", "config": {}}])
def test_unknown_schedules_are_refused(schedule):
    with pytest.raises(ValueError, match=r"must be a record of .* names \[.*'sync'.*got .*import its module"):
        functional(schedule)


@pytest.mark.parametrize(
    ("make", "wrong", "words"),
    [
        (FrozenWindow, (0, -1, 2.0, True, None), "micro_batches must be an int >= 1, got"),
        (Nested, (0, 1.5, True), "micro_batches must be an int >= 1, got"),
        (DualBuffer, (0, 5, 2.0, True, None, "2"), "lead must be an int from 1 to 4, got"),
        (lambda lead: Nested(2, lead), (0, 5, True), "lead must be an int from 1 to 4, got"),
        (Pipelined, (0, 7, True, 2.5, "3"), "depth must be an int from 1 to 6, got"),
        (get, ("sync(2)", "nested(2, leads=3)"), "does not have the arguments of its record"),
    ],
)
def test_wrong_arguments_are_refused(make, wrong, words):
    for value in wrong:
        with pytest.raises(ValueError, match=words):
            make(value)


@pytest.mark.parametrize("schedule", [FrozenWindow(2), DualBuffer(), Nested(2), *STALE, Pipelined(2), RouteAhead()])
def test_a_model_without_tables_is_refused(schedule):
    model = functional(schedule)
    with pytest.raises(ValueError, match="hides the exchanges of a FusedEmbedding.* has none. Use schedule='sync'"):
        model.fit(np.zeros([8, 3]), np.zeros(8), verbose=0)
    model.schedule = "sync"
    model.compile("sgd", "mse")
    model.fit(np.zeros([8, 3]), np.zeros(8), verbose=0)


@pytest.mark.parametrize("schedule", [FrozenWindow(2), DualBuffer(), Nested(2), *STALE])
def test_tables_of_tfra_are_refused(schedule):
    table = {"optimizer": keras.optimizers.Adam(0.1)}
    embedding = clicks.make_embedding(table=table, backend="tfra")
    with pytest.raises(ValueError, match="need backend='native', and .* have 'tfra'"):
        clicks.make_model(embedding, schedule)


@pytest.mark.both
@pytest.mark.parametrize("schedule", STALE)
def test_a_table_keeps_the_rows_whose_gradients_are_under_way(schedule):
    """The second of these schedules has the rows of two steps in use. LFU alone would evict the newer ones."""
    rows = []
    for limits in (Limits(), Limits(max_rows_per_rank=12, eviction="lfu")):
        embedding = clicks.make_embedding(table={"limits": limits})
        model = clicks.make_model(embedding, features=("user",))
        for model.schedule, first_ids in (("sync", [0, 0, 0]), (schedule, [6, 12, 6, 12])):
            ids = np.concatenate([np.arange(first, first + 6) for first in first_ids])
            data = tf.data.Dataset.from_tensor_slices(({"user": ids}, np.sin(ids))).batch(6)
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(data, verbose=0)
        rows.append(dict(zip(*embedding.export_table("user"))))
    everything, kept = rows
    assert sorted(everything) == [*range(18)] and sorted(kept) == [*range(6, 18)]
    np.testing.assert_array_equal([*kept.values()], [everything[i] for i in kept])
