"""Loads of full saves and deltas: into empty and full tables, of other specs and names, and all rows at once."""

import gc
import logging

import numpy as np
import pytest

from tests.checkpoint import simulated
from tests.checkpoint.forger import IDS, model, save_two, table_of
from tests.checkpoint.tables import DictTable, contents, embedding_of
from tf_fusedrec import checkpoint, keras
from tf_fusedrec.checkpoint.loading import read_tables


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Returns a checkpoint with a delta, which loads read in many chunks, and its table."""
    monkeypatch.setattr("tf_fusedrec.files.shard_file._CHUNK_BYTES", 1)
    return tmp_path / "c", save_two(tmp_path / "c")


def test_empty_and_full_tables_take_the_rows_which_are_restored_once(saved):
    directory, table = saved
    for other in (table_of(), table_of(*IDS[-5:])):
        dense = model(5.0)
        assert checkpoint.load(directory, dense, layers=[embedding_of(other)]) == "delta"
        assert contents([other]) == contents([table]) and other.clock == table.clock
        assert all((w == 1.0).all() for w in dense.get_weights())
        assert other.calls[0] == ("clear",) and sum(call[3] for call in other.calls[1:]) == len(IDS) * 2 - 5


@pytest.mark.parametrize(
    ("options", "shown"),
    [({"dim": 5}, "'dim': 5"), ({"slot": "momentum"}, r"'slots': \['momentum', 'scale'\]")],
    ids=["dim", "optimizer"],
)
def test_a_checkpoint_of_another_spec_is_refused_with_both_shown(options, shown, saved):
    directory, _ = saved
    other = table_of(*IDS[:3], **options)
    rows = contents([other])
    words = rf"Table 'item' of .* has another spec. Saved: .*'dim': 4.*'slots': \['accumulator'.* Now: .*{shown}"
    with pytest.raises(ValueError, match=words):
        checkpoint.load(directory, model(0), layers=[embedding_of(other)])
    assert contents([other]) == rows


def test_records_that_do_not_suit_the_table_are_refused(tmp_path):
    """Refuses records of another size from a backend of equal spec, instead of reading wrong numbers."""
    simulated.save(tmp_path, [table_of(*IDS[:5], changes=False)])
    with pytest.raises(ValueError, match=r"item.rows-0.shard holds records \[\('row'.*but the table wants \[\('last'"):
        simulated.load(tmp_path, [table_of()])


def test_read_tables_gives_all_rows_of_full_save_and_delta(saved):
    directory, table = saved
    tables = read_tables(directory)
    assert sorted(tables) == ["item", "user"]
    for name, read in tables.items():
        want = table.rows["rows"][name]
        assert read.ids.tolist() == sorted(want) and len(read.ids) == {"item": 3000, "user": 2995}[name]
        fields = {"row": read.rows, "count": read.lookups, "last": read.last, "updated": read.updated}
        for field, values in fields.items():
            np.testing.assert_array_equal(values, [want[i][field] for i in sorted(want)])


def test_a_table_loads_under_another_name(saved):
    directory, table = saved
    other = DictTable("article", "user", candidates=True)
    checkpoint.load(directory, model(0.0), names={"article": "item"}, layers=[embedding_of(other)])
    of_item, of_article = contents([table]), contents([other])
    renamed = {"item": "article", "user": "user"}
    assert of_article == {(section, renamed[name]): rows for (section, name), rows in of_item.items()}
    for names, words in (
        ({}, r"holds no table 'article'. It holds \['item', 'user'\].*names=\{'article': <its name there>\}"),
        ({"article": "items"}, "holds no table 'items'"),
        ({"items": "item"}, r"names has \['items'\], want tables of model .*, which has \['article', 'user'\]"),
    ):
        with pytest.raises(ValueError, match=words):
            checkpoint.load(directory, model(0.0), names=names, layers=[embedding_of(other)], partial=bool(names))
    assert contents([other]) == of_article
    wide = DictTable("article", dim=5, candidates=True)
    with pytest.raises(ValueError, match=r"Table 'article' \(saved as 'item'\) of checkpoint .* has another spec"):
        checkpoint.load(directory, model(0.0), names={"article": "item"}, layers=[embedding_of(wide)])


def test_read_tables_knows_bfloat16(tmp_path):
    class Bfloat16Table(DictTable):
        def spec(self, name):
            return {**super().spec(name), "dim": 2, "slots": []}

        def record_dtype(self, section):
            return np.dtype([("row", "<u2", (2,))])

        def snapshot(self, name, section="rows", since=None, *, in_hash_order=True):
            return np.array([0, 1]), np.array([([0x3F80, 0xC000],), ([0, 0x4040],)], self.record_dtype(section))

    simulated.save(tmp_path, [Bfloat16Table("item")])
    ids, rows, lookups, *_ = read_tables(tmp_path)["item"]
    assert lookups is None and ids.tolist() == [0, 1] and rows.dtype.name == "bfloat16"
    np.testing.assert_array_equal(rows.astype(np.float32), [[1.0, -2.0], [0.0, 3.0]])


def test_an_empty_checkpoint_has_tables_without_rows(tmp_path):
    checkpoint.save(tmp_path / "c", model(0), layers=[embedding_of(DictTable("item", dim=3))])
    ids, rows, *_ = read_tables(tmp_path / "c")["item"]
    assert ids.shape == (0,) and rows.shape == (0, 3)


def test_weights_without_their_optimizer_load_without_warnings(tmp_path, caplog, monkeypatch):
    trained_model = model(1.0)
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.apply_gradients([(weight * 0.5, weight) for weight in trained_model.trainable_weights])  # makes slots
    tables = [embedding_of(DictTable("item", dim=3))]
    checkpoint.save(tmp_path / "c", trained_model, optimizer, layers=tables)
    monkeypatch.setattr(logging.getLogger("tensorflow"), "propagate", True)
    loaded = model(0.0)
    checkpoint.load(tmp_path / "c", loaded, layers=tables)
    gc.collect()  # TensorFlow warns when it forgets the checkpoint.
    np.testing.assert_array_equal(loaded.get_weights()[0], trained_model.get_weights()[0])
    assert not [record for record in caplog.records if record.name == "tensorflow"]


def several():
    parts = {".*bias": keras.optimizers.SGD(0.1, momentum=0.9)}
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.1), parts))


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
        *([lambda: keras.optimizers.Muon(0.1)] if hasattr(keras.optimizers, "Muon") else []),
        *([several] if hasattr(keras.optimizers, "MultiOptimizer") else []),
    ],
)
def test_training_goes_on_with_every_variable_of_the_optimizer(make, tmp_path):
    x, y = np.random.default_rng(0).normal(size=(12, 3)), np.ones([12, 1])
    table, models = [embedding_of(DictTable("item", dim=3))], []
    for _ in range(2):
        models.append(keras.Sequential([keras.Input([3]), keras.layers.Dense(4), keras.layers.Dense(1)]))
        models[-1].compile(make(), "mse")
    models[0].fit(x, y, batch_size=4, verbose=0)  # three steps: a gradient waits
    checkpoint.save(tmp_path / "c", models[0], models[0].optimizer, layers=table)
    checkpoint.load(tmp_path / "c", models[1], models[1].optimizer, layers=table)
    for each in models:
        each.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    for weights in zip(*(each.get_weights() for each in models), strict=True):
        np.testing.assert_array_equal(*weights)


def test_an_optimizer_with_variables_of_no_weight_is_refused(tmp_path):
    class Counting(keras.optimizers.SGD):
        def build(self, variables):
            super().build(variables)
            self.seen = self.add_variable([], name="seen")

    trained_model, optimizer = model(1.0), Counting(0.1)
    optimizer.build(trained_model.trainable_variables)
    with pytest.raises(ValueError, match="Counting has variables .*seen.* that are in no list .* Use lists"):
        checkpoint.save(tmp_path / "c", trained_model, optimizer, layers=[embedding_of(DictTable("item", dim=3))])
