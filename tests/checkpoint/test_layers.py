"""A checkpoint holds all layers of a model, at any depth. Layers that it would omit or confuse are refused."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.checkpoint import simulated
from tests.checkpoint.tables import DictTable, contents, embedding_of, ranks_of
from tf_fusedrec import callbacks, checkpoint, keras, tf
from tf_fusedrec.checkpoint import saving
from tf_fusedrec.checkpoint.loading import read_tables


def trained(name):
    table = DictTable(name)
    table.train(name, range(len(name), len(name) + 9), np.random.default_rng(len(name)))
    return table


class Holder(keras.Model):
    """A model that holds layers in attributes, lists and nested layers."""

    def __init__(self, tables):
        super().__init__()
        one, two, three, four, five = (embedding_of(table, name=f"layer_{table.names[0]}") for table in tables)
        self.one, self.several = one, [two, {"x": (three,)}]
        self.inner = keras.Model()
        self.inner.embedding = four
        self.block = keras.layers.Layer()
        self.block.embedding = five


NAMES = ["a", "bb", "ccc", "dddd", "eeeee"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_all_layers_of_a_model_are_saved_and_loaded(wrapped, tmp_path):
    def held(tables):
        return keras.Sequential([Holder(tables)]) if wrapped else Holder(tables)

    saved, loaded = [trained(name) for name in NAMES], [DictTable(name) for name in NAMES]
    checkpoint.save(tmp_path, held(saved))
    checkpoint.load(tmp_path, held(loaded))
    assert sorted(read_tables(tmp_path)) == NAMES
    assert contents(loaded) == contents(saved) and all(table.size(table.names[0]) == 9 for table in loaded)


def test_a_layer_that_the_model_does_not_hold_is_named_beside_it(tmp_path):
    tables, others = [trained("a"), trained("bb")], [DictTable("a"), DictTable("bb")]
    checkpoint.save(tmp_path, embedding_of(tables[0]), layers=[embedding_of(tables[1])])
    checkpoint.load(tmp_path, embedding_of(others[0]), layers=[embedding_of(others[1])])
    assert contents(others) == contents(tables)


def test_the_callback_saves_and_restores_all_layers(tmp_path):
    """Saves two layers. A checkpoint of the older layer alone would lose the other's rows."""

    def model():
        layers = [
            fr.FusedEmbedding([fr.FeatureConfig(n, n)], [fr.TableConfig(n, 2, fr.optimizers.SGD(0.1))], name=f"of_{n}")
            for n in ("item", "user")
        ]
        inputs = {n: keras.Input([], dtype=tf.int64, name=n) for n in ("item", "user")}
        item, user = (layer({n: inputs[n]})[n] for layer, n in zip(layers, inputs))
        made = keras.Model(inputs, keras.layers.Dense(1)(item * user))
        made.compile(keras.optimizers.SGD(0.1), "mse")
        return made, layers

    ids = {"item": np.arange(6), "user": np.arange(6) + 10}
    first, trained_layers = model()
    first.fit(ids, np.ones(6), batch_size=6, callbacks=[callbacks.Checkpoint(tmp_path, 1, {})], verbose=0)
    second, layers = model()
    assert callbacks.Checkpoint(tmp_path, 1, {}).load(second) == (1, 0)
    for layer, want, name in zip(layers, trained_layers, ids):
        assert layer.export_table(name)[0].tolist() == ids[name].tolist()
        np.testing.assert_array_equal(layer.export_table(name)[1], want.export_table(name)[1])
    # Imported rows reach their table in either layer.
    assert checkpoint.warm_start(second, "user", np.array([99]), np.ones([1, 2])) == 1
    assert 99 in layers[1].export_table("user")[0] and 99 not in layers[0].export_table("item")[0]


def test_layers_of_other_topologies_share_a_checkpoint(tmp_path):
    """Each of four ranks writes its own piece of each layer. In two groups of two, ranks 1 and 2 swap shards."""
    whole, grouped = trained("whole"), trained("grouped")
    of_whole = ranks_of(lambda: DictTable("whole"), 4, lambda table: table.rows.update(whole.rows))
    plan = saving.make_plan(tmp_path, 4, None, {})
    for rank, piece in enumerate([0, 2, 1, 3]):
        cuts = [*saving.copy_tables([of_whole[rank]], plan, rank), *saving.copy_tables([grouped], plan, piece, 2)]
        saving.write_shard(tmp_path, plan, cuts, rank)
    saving.commit(tmp_path, plan, simulated.DENSE, None, timeout_s=5)
    for table in (whole, grouped):
        (name,) = table.names
        assert read_tables(tmp_path)[name][0].tolist() == sorted(table.rows["rows"][name])


def test_models_whose_tables_no_checkpoint_can_hold_are_refused(tmp_path):
    both, plain = keras.Model(name="both"), keras.Model(name="plain")
    both.two = [embedding_of(DictTable("item"), name="one"), embedding_of(DictTable("x", "item"), name="two")]
    twice = "layers 'one' and 'two' of model 'both' both have a table 'item'.* another TableConfig.name"
    none = r"model 'plain' holds no FusedEmbedding layer.*pass it in layers=\[...\]"
    other = "model must be a keras.Model or a FusedEmbedding, got str"
    for error, words, call in (
        (ValueError, twice, lambda: checkpoint.save(tmp_path / "c", both)),
        (ValueError, twice, lambda: checkpoint.load(tmp_path / "c", both)),
        (ValueError, twice, lambda: checkpoint.warm_start(both, "x", np.array([1]), np.ones([1, 4]))),
        (ValueError, none, lambda: checkpoint.save(tmp_path / "c", plain)),
        (TypeError, other, lambda: checkpoint.save("c", "model")),
        (TypeError, "optimizer .* got the layer 'one'", lambda: checkpoint.save(tmp_path / "c", plain, both.two[0])),
        (TypeError, "layers must be a list of", lambda: checkpoint.save(tmp_path / "c", plain, layers=both.two[0])),
    ):
        with pytest.raises(error, match=words):
            call()
    assert not (tmp_path / "c").exists()
