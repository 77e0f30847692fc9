"""A user's own schedule registers under a name, is saved with its model, and comes back."""

import dataclasses

import numpy as np
import pytest

from tf_fusedrec import keras
from tf_fusedrec.schedules import FrozenWindow, Pipelined, PipelinedModel, Schedule, Sync, register
from tf_fusedrec.schedules.schedule import get, serialize


@register("tests>skipping")
@dataclasses.dataclass(frozen=True)
class Skipping(Schedule):
    """Trains whole batches, and has a number as option."""

    every: int = 1

    def train_step(self, model, data):
        return keras.Model.train_step(model, data)


def functional(schedule):
    x = keras.Input([3])
    model = PipelinedModel(x, keras.layers.Dense(1)(x), schedule=schedule)
    model.compile("sgd", "mse")
    return model


def test_a_users_schedule_is_saved_with_its_model_and_loaded(tmp_path):
    model = functional(Skipping(3))
    assert model.get_config()["schedule"] == {"name": "tests>skipping", "config": {"every": 3}}
    model.fit(np.ones([4, 3]), np.zeros([4]), verbose=0)
    model.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").schedule == Skipping(3)


@pytest.mark.parametrize("schedule", [Sync(), FrozenWindow(4), Pipelined(6)])
def test_schedules_of_the_package_come_back_from_their_config(schedule):
    assert get(serialize(schedule)) == schedule


def test_a_class_without_a_name_is_refused_when_its_model_is_saved():
    class Unnamed(Skipping):
        pass

    with pytest.raises(ValueError, match=r"class .*Unnamed is not registered.*@tf_fusedrec.schedules.register"):
        functional(Unnamed()).get_config()


def test_an_unknown_name_says_which_ones_are_registered():
    with pytest.raises(ValueError, match=r"the registered names \[.*'sync'.*got .*'gone'.*import its module"):
        get({"name": "gone", "config": {}})


def test_a_name_belongs_to_one_class_and_names_schedules_only():
    assert register("tests>skipping")(Skipping) is Skipping  # a notebook's cell runs twice
    with pytest.raises(ValueError, match=r"the name 'sync' for Skipping, and tf_fusedrec.*Sync has it"):
        register("sync")(Skipping)
    with pytest.raises(TypeError, match="takes a subclass of schedules.Schedule"):
        register("tests>number")(int)
