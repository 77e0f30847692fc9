"""Savers of TensorFlow and Keras include the tables of one process, and are refused by name where they cannot."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.checkpoint.tables import DictTable, contents
from tf_fusedrec import keras, tf
from tf_fusedrec.tables.state import TableState

INPUTS = {"a": np.array([1, -2, 3, 1]), "b": np.array([5, 6, 7, 7])}


def compiled(backend, names=("item", "tag"), dim=4):
    """Returns a model whose tables train by Adam. One table lies in a nested model."""
    adam = keras.optimizers.legacy.Adam(0.1)
    key_encoding = {"key_encoding": "hash"} if backend == "tfra" else {}
    emb = fr.FusedEmbedding(
        tables=[fr.TableConfig(name, dim, adam) for name in names],
        features=[fr.FeatureConfig(feature, name) for feature, name in zip("ab", names)],
        backend=backend,
        **key_encoding,
    )
    inputs = {name: keras.Input([], dtype=tf.int64) for name in "ab"}
    inner = keras.Model(inputs, emb(inputs))
    rows = inner(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(rows["a"] * rows["b"]))
    model.compile(keras.optimizers.legacy.Adam(0.05), "mse")
    return model, emb


def fit(model, epochs, **options):
    model.fit(INPUTS, np.ones(4), epochs=epochs, batch_size=4, shuffle=False, verbose=0, **options)


def state(model, emb):
    tables = {
        name: [array.tobytes() for array in lookup.table.snapshot(name)]
        for lookup in emb.lookups
        for name in lookup.table.names
    }
    steps = {name: int(optimizer.iterations.numpy()) for name, optimizer in emb.optimizers.items()}
    return tables, steps, [lookup.table.clock for lookup in emb.lookups], [w.tolist() for w in model.get_weights()]


@pytest.fixture(params=["native", "tfra"])
def trained(request):
    model, emb = compiled(request.param)
    fit(model, 3)
    other = compiled(request.param)
    fit(other[0], 1)
    return model, emb, *other


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weights", "x.weights.h5"])
def test_save_weights_has_the_tables(name, trained, tmp_path):
    model, emb, other, loaded = trained
    model.save_weights(tmp_path / name)
    other.load_weights(tmp_path / name)
    assert state(other, loaded) == state(model, emb)
    fit(model, 2)
    assert state(other, loaded) != state(model, emb)


@pytest.mark.slow
def test_a_checkpoint_of_tensorflow_has_the_tables_and_training_goes_on(trained, tmp_path):
    model, emb, other, loaded = trained
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "c"))
    tf.train.Checkpoint(model=other).read(path).assert_consumed()
    assert state(other, loaded) == state(model, emb)
    fit(model, 2)
    fit(other, 2)
    assert state(other, loaded) == state(model, emb)


def test_a_model_file_of_keras_has_the_tables(tmp_path):
    model, emb = compiled("native")
    fit(model, 3)
    model.save(tmp_path / "m.keras")
    other = keras.models.load_model(tmp_path / "m.keras", custom_objects={"FusedEmbedding": fr.FusedEmbedding})
    (inner,) = (layer for layer in other.layers if isinstance(layer, keras.Model))
    (loaded,) = (layer for layer in inner.layers if isinstance(layer, fr.FusedEmbedding))
    assert state(other, loaded) == state(model, emb)


class Stop(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 3:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "tfra"])
def test_backup_and_restore_goes_on_with_the_tables(backend, tmp_path):
    whole, whole_tables = compiled(backend)
    fit(whole, 5)
    with pytest.raises(KeyboardInterrupt):
        fit(compiled(backend)[0], 5, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "b"), Stop()])
    model, emb = compiled(backend)
    fit(model, 5, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "b")])
    assert state(model, emb) == state(whole, whole_tables)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning")
@pytest.mark.parametrize("name", ["w.h5", "m.h5"])
def test_legacy_hdf5_files_are_refused_by_name(name, trained, tmp_path):
    model = trained[0]
    words = r"FusedEmbedding 'fused_embedding': a legacy HDF5 file \(.h5\) cannot hold its tables \['item', 'tag'\]"
    (tmp_path / name).write_bytes(b"another file")
    for file in (tmp_path / name, tmp_path / f"new-{name}"):
        with pytest.raises(ValueError, match=words):
            (model.save_weights if name == "w.h5" else model.save)(file)
    # Nothing was written, and an existing file was not truncated.
    assert [file.name for file in tmp_path.iterdir()] == [name] and (tmp_path / name).read_bytes() == b"another file"
    with fr.checkpoint.without_tables():
        model.save_weights(tmp_path / "dense.h5")
    plain = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])
    plain.save_weights(tmp_path / "plain.h5")  # models without tables are as ever


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["save", "export", "saved_model", "without_tables"])
def test_a_saved_model_is_refused_in_one_line_with_the_remedy(saver, tmp_path):
    model, _ = compiled("native")
    words = (
        r"^FusedEmbedding 'fused_embedding': a SavedModel of .* cannot hold its tables \['item', 'tag'\]. "
        r"Use tf_fusedrec.export\(model, folder\) .* tf_fusedrec.checkpoint.save,? .*$"
    )
    with pytest.raises(ValueError, match=words) as refusal:
        if saver == "save":
            model.save(tmp_path / "m")
        elif saver == "export":
            model.export(tmp_path / "m")
        elif saver == "saved_model":
            tf.saved_model.save(model, str(tmp_path / "m"))
        else:  # files then lack rows, but a SavedModel still calls the tables
            with fr.checkpoint.without_tables():
                model.save(tmp_path / "m")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "m").exists()
    plain = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])
    plain.export(tmp_path / "plain")  # models without tables are as ever


@pytest.mark.slow
def test_without_tables_the_dense_weights_go_alone(trained, tmp_path):
    model, emb, other, loaded = trained
    before = state(other, loaded)
    with fr.checkpoint.without_tables():
        path = tf.train.Checkpoint(model=model).write(str(tmp_path / "c"))
        tf.train.Checkpoint(model=other).read(path).assert_consumed()
    assert state(other, loaded) == (*before[:3], state(model, emb)[3])
    with pytest.raises(ValueError, match="FusedEmbedding 'fused_embedding': the file was saved without tables"):
        tf.train.Checkpoint(model=other).read(path)


@pytest.mark.slow
def test_checkpoints_of_this_package_keep_tables_out_of_their_dense_part(trained, tmp_path):
    model, emb, other, loaded = trained
    fr.checkpoint.save(tmp_path / "c", model, model.optimizer)
    prefix = fr.checkpoint.dense_prefix(tmp_path / "c")
    kept = [name for name, _ in tf.train.list_variables(prefix) if "table_state" in name]
    assert [tf.train.load_variable(prefix, name) for name in kept] == [b""]
    fr.checkpoint.load(tmp_path / "c", other, other.optimizer)
    assert state(other, loaded) == state(model, emb)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 5}, "table 'item' was saved with the spec .*'dim': 4.* but has .*'dim': 5.* now"),
        ({"names": ("item", "user")}, r"the file holds no table 'user'. It holds \['item', 'tag'\]"),
    ],
)
def test_tables_of_other_specs_and_names_are_refused_and_nothing_is_loaded(change, words, tmp_path):
    table, other = DictTable("item", "tag"), DictTable(*change.get("names", ("item", "tag")), dim=change.get("dim", 4))
    for each in (table, other):
        each.train("item", [1, 2], np.random.default_rng(0))
    data = TableState("emb", [table], 1).serialize()
    before = contents([other])
    with pytest.raises(ValueError, match=words):
        TableState("emb", [other], 1).deserialize(data)
    assert contents([other]) == before


def test_dropped_and_regrouped_tables_are_found_by_name():
    first, second = DictTable("item", "tag", candidates=True, steps=3), DictTable("user", candidates=True, steps=4)
    for table in (first, second):
        for name in table.names:
            table.train(name, [1, -5, 9], np.random.default_rng(len(name)))
            table.rows["candidates"][name][4] = np.array((2,), [("count", "<u4")])[()]
    data = TableState("emb", [first, second], 1).serialize()
    other = DictTable("user", "item", candidates=True)
    other.train("user", [77], np.random.default_rng(0))
    TableState("emb", [other], 1).deserialize(data)
    want = {**contents([first]), **contents([second])}
    assert contents([other]) == {key: rows for key, rows in want.items() if key[1] != "tag"}
    assert other.clock == first.clock == 2 << 32 | 2 and other.optimizer.iterations.value == 4


def test_several_ranks_are_refused_with_the_remedy():
    state_of_rank = TableState("emb", [DictTable("item")], 2)
    words = r"FusedEmbedding 'emb': with 2 processes, a file of tf.train.Checkpoint, save_weights, BackupAndRestore or "
    for call in (state_of_rank.serialize, lambda: state_of_rank.deserialize(b"x")):
        with pytest.raises(ValueError, match=words + r".*\(tables \['item'\]\). Use tf_fusedrec.checkpoint.save and "):
            call()
    with fr.checkpoint.without_tables():
        assert state_of_rank.serialize() == b""
        state_of_rank.deserialize(b"")
