"""Savers of TensorFlow and Keras include the tables of one process, and are refused by name where they cannot."""

import copy
import pickle

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.checkpoint.tables import DictTable, contents
from tf_fusedrec import keras, tf
from tf_fusedrec.checkpoint.loading import dense_prefix
from tf_fusedrec.tables.keras_savers import TableState

pytestmark = pytest.mark.both

INPUTS = {"a": np.array([1, -2, 3, 1]), "b": np.array([5, 6, 7, 7])}


def compiled(backend):
    """Returns a model whose tables train by Adam. One table lies in a nested model."""
    tables = [fr.TableConfig(name, 4, keras.optimizers.Adam(0.1)) for name in ("item", "tag")]
    features = [fr.FeatureConfig("a", "item"), fr.FeatureConfig("b", "tag")]
    options = {"key_encoding": "hash"} if backend == "tfra" else {}
    emb = fr.FusedEmbedding(features, tables, backend=backend, **options)
    inputs = {name: keras.Input([], dtype=tf.int64) for name in "ab"}
    inner = keras.Model(inputs, emb(inputs))
    rows = inner(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(rows["a"] * rows["b"]))
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model, emb


def fit(model, epochs, **options):
    model.fit(INPUTS, np.ones(4), epochs=epochs, batch_size=4, shuffle=False, verbose=0, **options)


def state(model, emb):
    tables = {
        name: [array.tobytes() for array in group.table.snapshot(name)]
        for group in emb.internals.groups
        for name in group.table.names
    }
    steps = {name: int(optimizer.iterations.numpy()) for name, optimizer in emb.optimizers.items()}
    clocks = [group.table.clock for group in emb.internals.groups]
    return tables, steps, clocks, [weight.tolist() for weight in model.get_weights()]


@pytest.fixture(scope="module", params=["native", "tfra"])
def made_once(request):
    """Two trained models, each with its embedding and its weights."""
    keras.backend.clear_session()
    models = []
    for epochs in (3, 1):
        model, emb = compiled(request.param)
        fit(model, epochs)
        models.append((model, emb, model.get_weights()))
    return models


@pytest.fixture
def trained(made_once):
    for model, _, weights in made_once:
        model.set_weights(weights)
    return [part for model, emb, _ in made_once for part in (model, emb)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("weights", marks=pytest.mark.legacy), "x.weights.h5"])
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


@pytest.mark.parametrize("backend", ["native", pytest.param("tfra", marks=pytest.mark.slow)])
def test_a_list_of_weights_has_the_tables(backend):
    model, emb = compiled(backend)
    fit(model, 3)
    weights, want = model.get_weights(), state(model, emb)
    copies = copy.deepcopy(weights), [weight.copy() for weight in weights]
    for kept in (weights, *copies):
        fit(model, 1)
        assert state(model, emb) != want
        model.set_weights(kept)
        assert state(model, emb)[0] == want[0] and state(model, emb)[1:] == want[1:]
    clone = keras.models.clone_model(model)
    (loaded,) = fr.embedding.embeddings_of(clone)
    assert state(clone, loaded)[1] == {"item": 0, "tag": 0}
    clone.set_weights(weights)
    assert state(clone, loaded) == want
    words = r"FusedEmbedding 'fused_embedding': set_weights would leave its tables \['item', 'tag'\] behind"
    more = model.get_weights()
    average = [(a + b) / 2 for a, b in zip(weights, more)]
    for other in (average, pickle.loads(pickle.dumps(weights)), [np.asarray(weight) for weight in weights]):
        for target in (clone, keras.models.clone_model(model)):  # with rows, and empty
            with pytest.raises(ValueError, match=words):
                target.set_weights(other)
    with pytest.raises(ValueError, match="weight list of length 2"):  # Keras' own words
        model.set_weights(weights[1:])
    with fr.checkpoint.without_tables():
        model.set_weights([np.zeros_like(weight) for weight in weights])
    assert state(model, emb)[0] == want[0] and not any(np.any(w) for w in state(model, emb)[3])


def test_a_list_of_weights_from_before_the_training_empties_the_tables():
    model, emb = compiled("native")
    weights = model.get_weights()
    fit(model, 1)
    model.set_weights(weights)
    assert [emb.export_table(name)[0].tolist() for name in ("item", "tag")] == [[], []]
    model.set_weights([np.asarray(weight) for weight in weights])  # nothing is left behind


def of_one_table(schedule):
    """Returns a model and its embedding: a keras.Model if the schedule is None."""
    embedding = fr.FusedEmbedding([fr.FeatureConfig("f", "t")], [fr.TableConfig("t", 4, fr.optimizers.SGD(0.5))])
    x = keras.Input([], dtype=tf.int64, name="f")
    parts = {"f": x}, keras.layers.Dense(1)(embedding({"f": x})["f"])
    model = fr.schedules.PipelinedModel(*parts, schedule=schedule) if schedule else keras.Model(*parts)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model, embedding


def test_a_list_of_weights_has_the_updates_that_a_schedule_makes_late():
    (model, embedding), kept = of_one_table(fr.schedules.SemiAsync()), []
    keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: kept.append(model.get_weights()))
    data = tf.data.Dataset.from_tensors(({"f": np.arange(8)}, np.ones(8, np.float32)))
    model.fit(data.repeat(2), verbose=0, callbacks=[keep])
    trained = embedding.export_table("t")[1]
    model.set_weights(kept[-1])
    np.testing.assert_array_equal(embedding.export_table("t")[1], trained)


@pytest.mark.parametrize("schedule", [None, fr.schedules.SemiAsync()])
def test_keras_early_stopping_restores_the_tables(schedule):
    """keras-team/keras #12511."""
    model, _ = of_one_table(schedule)
    ids, seen = np.arange(64), []
    data = tf.data.Dataset.from_tensor_slices(({"f": ids}, (ids % 2).astype(np.float32))).batch(16)
    validation = tf.data.Dataset.from_tensors(({"f": ids}, np.full(64, 0.2, np.float32)))
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_, **__: seen.append(model.predict(validation, verbose=0))
    )
    stopping = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    losses = model.fit(data, epochs=9, validation_data=validation, callbacks=[note, stopping], verbose=0)
    best = int(np.argmin(losses.history["val_loss"]))
    assert best < len(seen) - 1
    np.testing.assert_array_equal(model.predict(validation, verbose=0), seen[best])


@pytest.mark.parametrize(
    ("ranks", "listener", "words"),
    [
        (2, lambda: keras.callbacks.EarlyStopping(restore_best_weights=True), r"EarlyStopping\(restore_best=True\)"),
        (2, lambda: keras.callbacks.ModelCheckpoint("x.keras", save_best_only=True), "callbacks.Checkpoint, with"),
        (2, lambda: keras.callbacks.BackupAndRestore("x"), "callbacks.Checkpoint and its load"),
        (2, lambda: keras.callbacks.TerminateOnNaN(), r"would stop a rank.*Use callbacks.Interrupt\(\) after it"),
        pytest.param(
            1, lambda: keras.callbacks.ModelCheckpoint("x.h5", save_weights_only=True), "would write no rows.*HDF5",
            marks=pytest.mark.legacy,
        ),
        pytest.param(
            1, lambda: keras.callbacks.ModelCheckpoint("x"), "would write no rows.*SavedModel.*ends in .keras",
            marks=pytest.mark.legacy,
        ),
    ],
)  # fmt: skip
def test_fit_refuses_callbacks_that_leave_tables_behind_before_its_first_step(ranks, listener, words):
    trained, emb = compiled("native")
    model = fr.schedules.PipelinedModel(trained.inputs, trained.outputs)  # Keras 3's own fit tells nobody
    model.compile("sgd", "mse")
    emb._table_state._ranks = ranks  # stands for a job of several ranks; the check needs no other
    with pytest.raises(ValueError, match=rf"FusedEmbedding 'fused_embedding': .*{words}"):
        fit(model, 1, callbacks=[listener()])
    assert len(emb.export_table("item")[0]) == 0


def test_averages_of_dense_weights_are_refused():
    model, emb = compiled("native")
    words = "FusedEmbedding 'fused_embedding': the optimizer Adam has use_ema=True"
    average = keras.optimizers.Adam(0.01, use_ema=True)
    model.compile(average, "mse")
    with pytest.raises(ValueError, match=words):
        fit(model, 1)
    pipelined = fr.schedules.PipelinedModel(model.inputs, model.outputs)
    with pytest.raises(ValueError, match=words):
        pipelined.compile(fr.collectives.distributed_optimizer(average), "mse")
    emb.trainable = False
    model.compile(average, "mse")
    fit(model, 1)  # rows that are not trained are their own average


def stop(epoch, logs):
    if epoch == 3:
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "tfra"])
def test_backup_and_restore_goes_on_with_the_tables(backend, tmp_path):
    whole, whole_tables = compiled(backend)
    fit(whole, 5)
    with pytest.raises(KeyboardInterrupt):
        stopping = keras.callbacks.LambdaCallback(on_epoch_begin=stop)
        fit(compiled(backend)[0], 5, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "b"), stopping])
    model, emb = compiled(backend)
    fit(model, 5, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "b")])
    assert state(model, emb) == state(whole, whole_tables)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning")
@pytest.mark.parametrize(
    ("name", "writer", "options"),
    [("w.h5", "save_weights", {}), ("w", "save_weights", {"save_format": "h5"}), ("m.h5", "save", {})],
)
def test_legacy_hdf5_files_are_refused_by_name(name, writer, options, trained, tmp_path):
    model = trained[0]
    words = r"FusedEmbedding 'fused_embedding': a legacy HDF5 file \(.h5\) cannot hold its tables \['item', 'tag'\]"
    (tmp_path / name).write_bytes(b"another file")
    for file in (tmp_path / name, tmp_path / f"new-{name}"):
        with pytest.raises(ValueError, match=words):
            getattr(model, writer)(file, **options)
    # Nothing was written, and an existing file was not truncated.
    assert [file.name for file in tmp_path.iterdir()] == [name] and (tmp_path / name).read_bytes() == b"another file"
    with fr.checkpoint.without_tables():
        model.save_weights(tmp_path / "dense.h5")
        model.load_weights(tmp_path / "dense.h5")
    for by_name in (False, True):
        with pytest.raises(ValueError, match=words):
            model.load_weights(tmp_path / "dense.h5", by_name=by_name)
    plain = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])
    plain.save_weights(tmp_path / "plain.h5")  # models without tables are as ever


@pytest.mark.slow
@pytest.mark.parametrize(
    "saver",
    [pytest.param("save", marks=pytest.mark.legacy), "export", "saved_model"]
    + [pytest.param("without_tables", marks=pytest.mark.legacy)],
)
def test_a_saved_model_is_refused_in_one_line_with_the_remedy(saver, trained, tmp_path):
    model = trained[0]
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
    with pytest.raises(ValueError, match=r"FusedEmbedding 'fused_embedding\w*': the file was saved without tables"):
        tf.train.Checkpoint(model=other).read(path)


@pytest.mark.slow
@pytest.mark.legacy  # Keras 3 does not track the tables
def test_checkpoints_of_this_package_keep_tables_out_of_their_dense_part(trained, tmp_path):
    model, emb, other, loaded = trained
    fr.checkpoint.save(tmp_path / "c", model, model.optimizer)
    prefix = dense_prefix(tmp_path / "c")
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
    state_of_rank._tables[0].train("item", [1], np.random.default_rng(0))
    with pytest.raises(ValueError, match="behind: with 2 processes a list of weights has no rows"):
        state_of_rank.rows_in(state_of_rank.in_weights())
    for call in (state_of_rank.serialize, lambda: state_of_rank.deserialize(b"x")):
        with pytest.raises(ValueError, match=words + r".*\(tables \['item'\]\). Use tf_fusedrec.checkpoint.save and "):
            call()
    with fr.checkpoint.without_tables():
        assert state_of_rank.serialize() == b""
        state_of_rank.deserialize(b"")
