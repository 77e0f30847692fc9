"""Damaged and foreign checkpoints are refused by name, and leave nothing in tables or weights."""

import gc
import json
import logging

import numpy as np
import pytest

from tests.checkpoint import simulated
from tests.checkpoint.forger import model
from tests.checkpoint.tables import DictTable, contents, embedding_of
from tf_fusedrec import checkpoint, keras

IDS = np.random.default_rng(3).integers(-(2**63), 2**63, 3000).tolist()


def trained(names, ids, **options):
    table = DictTable(*names, **options)
    for name in names:
        table.train(name, ids, np.random.default_rng(len(ids)))
    return table


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Returns a checkpoint with a delta. Loads read it in many chunks, so damage at the end shows late."""
    monkeypatch.setattr("tf_fusedrec.files.shard_file._CHUNK_BYTES", 1)
    table = trained(("item", "user"), IDS)
    job = checkpoint.Checkpointer(tmp_path / "c", model(1.0), layers=[embedding_of(table)], full_every=2)
    job.save("full")
    job.wait()
    table.train("item", IDS[:1500], np.random.default_rng(5))
    table.remove("user", IDS[:10])
    job.save("delta")
    job.wait()
    return tmp_path / "c", table


def damages(directory):
    """Returns (function that damages, words of the refusal) for every kind of damage."""
    full, delta = (f"{part['save']}/" for part in checkpoint.read_manifest(directory)["tables"]["item"]["parts"])

    def file_of(pattern):
        (path,) = directory.glob(pattern)
        return path

    def unlink(pattern):
        file_of(pattern).unlink()

    def flip(pattern, at):
        path = file_of(pattern)
        data = bytearray(path.read_bytes())
        data[at] ^= 16
        path.write_bytes(data)

    def truncate(pattern):
        path = file_of(pattern)
        path.write_bytes(path.read_bytes()[:-1000])

    def swap(one, other):
        one, other = file_of(one), file_of(other)
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)

    def manifest(old, new):
        path = directory / "manifest.json"
        assert old in path.read_text(encoding="utf-8")
        path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")

    rows_of_user, rows_of_item, changes_of_item = full + "user.rows*", full + "item.rows*", delta + "item.rows*"
    return {
        "missing rows": (lambda: unlink(rows_of_user), "user.rows-0.shard is missing"),
        "missing delta": (lambda: unlink(changes_of_item), "item.rows-0.shard is missing"),
        "missing tombstones": (lambda: unlink(delta + "user.tomb*"), "user.tombstones-0.shard is missing"),
        "missing weights": (lambda: unlink(delta + "dense.index"), "dense.index is missing"),
        "truncated rows": (lambda: truncate(rows_of_user), "user.rows-0.shard is truncated"),
        "truncated delta": (lambda: truncate(changes_of_item), "item.rows-0.shard is truncated"),
        "truncated weights": (lambda: truncate(delta + "dense.data*"), "dense.data-00000-of-00001 is truncated"),
        "a bit of the last row": (lambda: flip(rows_of_user, -500), "user.rows-0.shard is damaged: block .* differs"),
        "a bit of the delta": (lambda: flip(changes_of_item, -500), "item.rows-0.shard is damaged: block"),
        "a bit of the index": (lambda: flip(rows_of_item, -20), "is damaged: its index differs"),
        "a bit of the weights": (lambda: flip(delta + "dense.data*", 10), "dense.data-00000-of-00001 is damaged"),
        "tables swapped": (
            lambda: swap(rows_of_user, rows_of_item),
            "item.rows-0.shard is foreign: it has table 'user', but the manifest wants table 'item' here",
        ),
        "saves swapped": (
            lambda: swap(rows_of_item, changes_of_item),
            f"item.rows-0.shard is foreign: it has save '{delta[:-1]}', but the manifest wants save '{full[:-1]}'",
        ),
        "a digit of the manifest": (lambda: manifest('"clock": ', '"clock": 1'), "manifest.json is damaged: its check"),
        "a manifest cut off": (lambda: manifest('"tables"', ""), "manifest.json is damaged"),
        "another format": (lambda: manifest('"format": 2', '"format": 3'), "has format 3, but this version reads 2"),
        "no manifest": (lambda: (directory / "manifest.json").unlink(), "must hold a checkpoint, but .* is missing"),
    }


@pytest.mark.parametrize("number", range(17))
def test_damaged_checkpoints_are_refused_and_leave_nothing(number, saved):
    directory, _ = saved
    cases = [*damages(directory).items()]
    assert len(cases) == 17
    kind, (damage, words) = cases[number]
    damage()
    trained_before, empty = trained(("item", "user"), IDS[:7]), DictTable("item", "user")
    for table in (trained_before, empty):
        rows, clock = contents([table]), table.clock
        dense = model(5.0)
        with pytest.raises(ValueError, match=words):
            checkpoint.load(directory, dense, layers=[embedding_of(table)])
        assert contents([table]) == rows and table.clock == clock and table.optimizer.iterations.value == 0
        assert all((w == 5.0).all() for w in dense.get_weights())
    assert ("clear",) not in trained_before.calls
    if "weights" not in kind:
        with pytest.raises(ValueError, match=words):
            checkpoint.read_tables(directory)


def test_a_whole_one_is_loaded_into_empty_and_full_tables(saved):
    """Guards the tests above, which a load that always fails would pass."""
    directory, table = saved
    for other in (DictTable("item", "user"), trained(("item", "user"), IDS[-5:])):
        dense = model(5.0)
        assert checkpoint.load(directory, dense, layers=[embedding_of(other)]) == "delta"
        assert contents([other]) == contents([table]) and other.clock == table.clock
        assert all((w == 1.0).all() for w in dense.get_weights())


def test_rows_are_read_once_and_verified_before_old_ones_are_dropped(saved):
    directory, table = saved
    other = trained(("item", "user"), IDS[-5:])
    checkpoint.load(directory, model(0), layers=[embedding_of(other)])
    assert other.calls[0] == ("clear",) and {call[0] for call in other.calls[1:]} == {"restore"}
    assert sum(call[3] for call in other.calls[1:]) == len(IDS) * 2 - 10


@pytest.mark.parametrize(
    ("options", "shown"),
    [({"dim": 5}, "'dim': 5"), ({"slot": "momentum"}, r"'slots': \['momentum', 'scale'\]")],
    ids=["dim", "optimizer"],
)
def test_a_checkpoint_of_another_spec_is_refused_with_both_shown(options, shown, saved):
    directory, _ = saved
    other = trained(("item", "user"), IDS[:3], **options)
    rows = contents([other])
    words = (
        rf"Table 'item' of checkpoint .* has another spec. Saved: .*'dim': 4.*'slots': \['accumulator'.* Now: .*{shown}"
    )
    with pytest.raises(ValueError, match=words):
        checkpoint.load(directory, model(0), layers=[embedding_of(other)])
    assert contents([other]) == rows


def test_records_that_do_not_suit_the_table_are_refused(tmp_path):
    """Refuses records of another size from a backend of equal spec, instead of reading wrong numbers."""
    simulated.save(tmp_path, [trained(("item",), IDS[:5], changes=False)])
    with pytest.raises(ValueError, match=r"item.rows-0.shard holds records \[\('row'.*but the table wants \[\('last'"):
        simulated.load(tmp_path, [DictTable("item")])


def test_read_tables_gives_all_rows_of_full_save_and_delta(saved):
    directory, table = saved
    tables = checkpoint.read_tables(directory)
    assert sorted(tables) == ["item", "user"]
    for name, (ids, rows) in tables.items():
        want = table.rows["rows"][name]
        assert ids.tolist() == sorted(want) and len(ids) == {"item": 3000, "user": 2990}[name]
        np.testing.assert_array_equal(rows, [want[i]["row"] for i in sorted(want)])


def test_a_table_loads_under_another_name(saved):
    directory, table = saved
    other = DictTable("article", "user")
    checkpoint.load(directory, model(0.0), names={"article": "item"}, layers=[embedding_of(other)])
    of_item, of_article = contents([table]), contents([other])
    assert of_article == {("rows", "article"): of_item["rows", "item"], ("rows", "user"): of_item["rows", "user"]}
    for names, words in (
        ({}, r"holds no table 'article'. It holds \['item', 'user'\].*names=\{'article': <its name there>\}"),
        ({"article": "items"}, "holds no table 'items'"),
        (
            {"items": "item"},
            r"names has \['items'\], want tables of model .*, which has \['article', 'user'\]",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            checkpoint.load(directory, model(0.0), names=names, layers=[embedding_of(other)], partial=bool(names))
    assert contents([other]) == of_article
    wide = DictTable("article", dim=5)
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
    ids, rows = checkpoint.read_tables(tmp_path)["item"]
    assert ids.tolist() == [0, 1] and rows.dtype.name == "bfloat16"
    np.testing.assert_array_equal(rows.astype(np.float32), [[1.0, -2.0], [0.0, 3.0]])


def test_an_empty_checkpoint_has_tables_without_rows(tmp_path):
    checkpoint.save(tmp_path / "c", model(0), layers=[embedding_of(DictTable("item", dim=3))])
    ids, rows = checkpoint.read_tables(tmp_path / "c")["item"]
    assert ids.shape == (0,) and rows.shape == (0, 3)


def test_the_manifest_says_what_the_tables_are(saved):
    directory, table = saved
    described = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))["tables"]["item"]
    assert described["spec"] == json.loads(json.dumps(table.spec("item")))
    assert (described["owner"], described["clock"], described["iterations"]) == ("hash_range", table.clock, 0)


def test_weights_without_their_optimizer_load_without_warnings(tmp_path):
    trained_model = model(1.0)
    optimizer = keras.optimizers.legacy.Adam(0.1)
    optimizer.apply_gradients([(weight * 0.5, weight) for weight in trained_model.trainable_weights])  # makes slots
    tables = [embedding_of(DictTable("item", dim=3))]
    checkpoint.save(tmp_path / "c", trained_model, optimizer, layers=tables)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("tensorflow").addHandler(handler)
    try:
        loaded = model(0.0)
        checkpoint.load(tmp_path / "c", loaded, layers=tables)
        gc.collect()  # TensorFlow warns when it forgets the checkpoint.
    finally:
        logging.getLogger("tensorflow").removeHandler(handler)
    np.testing.assert_array_equal(loaded.get_weights()[0], trained_model.get_weights()[0])
    assert not said
