"""PipelinedModel is a keras.Model: two ways to write it, saved, restored, checkpointed."""

import ctypes
import gc
import os
import pathlib

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.schedules import clicks
from tf_fusedrec import keras, tf
from tf_fusedrec._tf_compat import KERAS_IS_LEGACY
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, PipelinedModel, SemiAsync, Sync


class Called(PipelinedModel):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(x)


def test_functional_and_subclassed_models_live_side_by_side():
    """Keras changes a class for good into a functional one with its first functional object. Ours stays unchanged."""
    x = keras.Input([3])
    functional = PipelinedModel(x, keras.layers.Dense(1)(x), schedule=FrozenWindow(2), name="mine")
    by_name = PipelinedModel(inputs=x, outputs=keras.layers.Dense(1)(x))
    subclassed = Called(schedule=FrozenWindow(3))
    for model in (functional, by_name, subclassed):
        assert isinstance(model, PipelinedModel) and model(tf.zeros([2, 3])).shape == [2, 1]
    assert functional.name == "mine"
    assert [m.schedule for m in (functional, by_name, subclassed)] == [FrozenWindow(2), Sync(), FrozenWindow(3)]
    with pytest.raises(ValueError, match="cannot be given inputs and outputs"):
        Called.__mro__[1].__init__(Called.__new__(Called), x, keras.layers.Dense(1)(x))


class Tower(keras.layers.Layer):
    def __init__(self, **named):
        super().__init__()
        self.embedding = fr.FusedEmbedding(
            [fr.FeatureConfig("f", self.name)], [fr.TableConfig(self.name, 4, fr.optimizers.SGD(0.1))], **named
        )


class Towers(Called):
    def __init__(self, **named):
        super().__init__()
        self.towers = [Tower(**named), Tower(**named)]


def test_layers_without_a_name_get_names_of_their_own_and_equal_names_are_refused():
    named = keras.layers.Dense(1, name="fused_embedding_1")
    second = "fused_embedding_2" if KERAS_IS_LEGACY else "fused_embedding_1"
    assert [tower.embedding.name for tower in Towers().towers] == ["fused_embedding", second], named
    with pytest.raises(ValueError, match="Two FusedEmbeddings of one model are named 'e', .* Use another name"):
        Towers(name="e").compile("sgd", "mse")


class Branching(keras.layers.Layer):
    """Needs AutoGraph, which tf_keras applies to the calls of layers."""

    def call(self, x):
        if tf.reduce_sum(x) > 0:
            return x + 1.0
        else:
            return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [
        ("sync", keras.optimizers.Adam),
        pytest.param(FrozenWindow(2), keras.optimizers.legacy.Adam, id="legacy"),
        (FrozenWindow(2), keras.optimizers.Adam),
        (DualBuffer(), keras.optimizers.Adam),
    ],
)
@pytest.mark.both
def test_a_step_is_traced_once_and_may_branch_in_layers(schedule, optimizer):
    ids = keras.Input([], dtype=tf.int64)
    table = fr.TableConfig("t", 4, fr.optimizers.SGD(0.1))
    embedding = fr.FusedEmbedding([fr.FeatureConfig("f", "t")], [table])
    hidden = keras.layers.SpectralNormalization(keras.layers.Dense(4))(embedding({"f": ids})["f"])  # it branches, too
    outputs = keras.layers.Dense(1)(Branching()(hidden) if KERAS_IS_LEGACY else hidden)
    model, traces = PipelinedModel(ids, outputs, schedule=schedule), []
    train_step = model.train_step
    model.train_step = lambda data: traces.append(data) or train_step(data)
    model.compile(optimizer(0.1), "mse")
    model.fit(tf.data.Dataset.from_tensor_slices((np.arange(8) % 5, np.arange(8.0))).batch(4), verbose=0)
    assert len(traces) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [pytest.param("sync", keras.optimizers.legacy.Adam, id="legacy"), (FrozenWindow(3), keras.optimizers.Adam)],
)
@pytest.mark.both
def test_a_saved_model_comes_back_with_its_schedule_and_trains_on(schedule, optimizer, tmp_path):
    table = fr.TableConfig("t", 4, fr.optimizers.Adam(0.1), fr.Uniform(-1, 1))
    embedding = fr.FusedEmbedding([fr.FeatureConfig("f", "t")], [table])
    ids = keras.Input([], dtype=tf.int64)
    model = PipelinedModel(ids, keras.layers.Dense(1)(embedding({"f": ids})["f"]), schedule=schedule)
    model.compile(optimizer(0.1), "mse")
    x, y = np.arange(8) % 5, np.arange(8.0)
    model.train_on_batch(x, y)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert type(loaded) is type(model) and loaded.schedule == model.schedule
    np.testing.assert_array_equal(loaded(x), model(x))
    for one in (model, loaded):
        one.train_on_batch(x, y)
    rows = next(layer for layer in loaded.layers if isinstance(layer, fr.FusedEmbedding))
    np.testing.assert_array_equal(rows.export_table("t")[1], embedding.export_table("t")[1])
    if optimizer is keras.optimizers.Adam:  # Keras' files hold its slots, but no slots of legacy optimizers
        np.testing.assert_array_equal(loaded.layers[-1].kernel, model.layers[-1].kernel)


class CompiledByHand(PipelinedModel):
    """A model whose own compile has arguments that no config holds."""

    compiled_by_hand = False

    def compile(self, by_hand, **kwargs):
        self.compiled_by_hand = by_hand
        super().compile(**kwargs)


def test_a_subclass_with_a_compile_of_its_own_is_compiled_by_hand_as_in_keras():
    model, loaded = CompiledByHand(), CompiledByHand()
    model.compile(True, optimizer="sgd", loss="mse")
    loaded.compile_from_config(model.get_compile_config())
    assert model.compiled_by_hand and not loaded.compiled_by_hand
    assert not (loaded._is_compiled if KERAS_IS_LEGACY else loaded.compiled)


def _living():
    """Returns the number of live graphs, tensors and variables, and of resident MiB."""
    gc.collect()
    kinds = (tf.Graph, tf.Tensor, tf.Variable)
    objects = gc.get_objects()  # Some raise errors when they are asked for their class.
    counts = [sum(issubclass(type(one), kind) for one in objects) for kind in kinds]
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return counts, pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Sync(), SemiAsync()])
def test_many_fits_keep_nothing(schedule):
    model = clicks.make_model(clicks.make_embedding(), schedule, features=("item", "user"))

    def train(fits):
        for fit in range(fits):
            x, *rest = clicks.batch(64, fit % 3)
            data = tf.data.Dataset.from_tensor_slices((({name: x[name] for name in ("item", "user")}), *rest)).batch(8)
            model.fit(data, validation_data=data, verbose=0)
            model.predict(data, verbose=0)

    train(3)
    before, mib = _living()
    train(10)
    after, mib_after = _living()
    assert all(now <= then for now, then in zip(after, before)), f"graphs, tensors, variables: {before}, then {after}"
    assert mib_after < mib + 16, "a graph of this model takes 2 MiB, and one for each fit would be more"
