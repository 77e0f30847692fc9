"""fr.export of a functional model, with either kind of operations: the SavedModel gives the model's answers."""

import json
import shutil
import types

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.saved_model import click_model
from tests.support.graphs import saved_operations
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.saved_model import applying
from tf_fusedrec.saved_model.export import read_all_rows, write_rank_rows
from tf_fusedrec.saved_model.signatures import default_signatures, flat_outputs

# The float32 numbers are equal; sums of pooled rows run in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
TFRA_IDS = np.array([click_model.LIMITS.min, -1, 0, 1, 7, 2**40, click_model.LIMITS.max])


@pytest.mark.parametrize("ops", ["stock", "ours"])
def test_it_answers_as_the_model(click, ops):
    loaded = tf.saved_model.load(str(click.folder / ops))
    for seed, expected in click.answers[1].items():
        inputs, answer = click_model.batch(seed), loaded.signatures["serving_default"]
        got = answer(**click_model.served(inputs))
        assert set(got) == {"click", "like"}
        for name in got:
            np.testing.assert_allclose(got[name], expected[name], **CLOSE)
    nothing = {name: value[:0] for name, value in click_model.served(click_model.batch(0)).items()}
    nothing |= {"history_row_splits": tf.zeros([1], tf.int64), "liked_dense_shape": tf.constant([0, 3], tf.int64)}
    assert answer(**nothing)["click"].shape == (0, 1)


def test_the_model_trains_on_as_before(click):
    for seed, before in click.answers[1].items():
        np.testing.assert_array_equal(click.answers["exported"][seed]["click"], before["click"])
        assert (click.answers[2][seed]["click"] != before["click"]).numpy().any()


def test_stock_needs_no_operation_but_those_of_tensorflow(click):
    known = {"Horovod", "Fusedrec>", "TFRA>"}
    assert not {op for op in saved_operations(click.folder / "stock") if any(op.startswith(name) for name in known)}
    assert {op for op in saved_operations(click.folder / "ours") if "Fusedrec>" in op} >= {"Fusedrec>TableRead"}


def test_only_the_remains_of_an_export_are_removed(tmp_path):
    """A killed export left its folder. Folders of a like name, or with other contents, belong to the user."""
    users = ["served.partial/rows", f"served.{'0' * 32}.partial/notes", f"other.{'0' * 32}.partial/rows"]
    for folder in (*users, f"served.{'a' * 32}.partial/rows", f"served.{'b' * 32}.partial"):
        (tmp_path / folder).mkdir(parents=True)
    inputs = keras.Input([1], name="x")
    fr.export(keras.Model(inputs, keras.layers.Dense(1)(inputs)), tmp_path / "served")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["served", *(name.split("/")[0] for name in users)])
    assert all((tmp_path / folder).is_dir() for folder in users)


def test_custom_signatures_and_ids_as_strings(click, tmp_path):
    """Strings are flat values of a ragged input and a dense one. The hash is of stock operations."""
    calls, model = [], click.model

    def first_click(inputs):
        calls.append(inputs)
        given = {**click_model.batch(0), "user": inputs["users"]}
        return {"first": model(given, training=False)["click"][0]}

    own = {"first_click": fr.Signature(first_click, {"users": tf.TensorSpec([6], tf.int64)})}
    signatures = {**default_signatures(model), **own}
    fr.export(model, tmp_path / "served", signatures=signatures, strings={"history": False, "user": True})
    assert len(calls) == 1, "tracing takes most of the time of an export"
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    inputs = click_model.batch(0)
    got = loaded.signatures["first_click"](users=inputs["user"])["first"]
    np.testing.assert_allclose(got, click.answers[2][0]["click"][0], **CLOSE)
    words = {"history": [f"w{i}" for i in range(len(inputs["history"].values))], "user": ["", "7", "7.0", *"abc"]}
    sent = {**click_model.served(inputs), **{name: tf.constant(of) for name, of in words.items()}}
    got = loaded.signatures["serving_default"](**sent)
    ids = {name: tf.constant(fr.hash_strings(of, integers=name == "user")) for name, of in words.items()}
    assert ids["user"][1] == ids["user"][2] == 7
    hashed = {**inputs, "history": inputs["history"].with_values(ids["history"]), "user": ids["user"]}
    expected = model(hashed, training=False)
    for name, value in got.items():
        np.testing.assert_allclose(value, expected[name], **CLOSE)
    assert not [op for op in saved_operations(tmp_path / "served") if ">" in op]
    for name in ("nobody", "click"):
        with pytest.raises(ValueError, match=f"strings names '{name}', whose dtypes are .*want int64 ids.*Use"):
            fr.export(model, tmp_path / "refused", strings=[name])


def test_outputs_are_flat_and_models_may_say_their_signatures():
    ragged = tf.RaggedTensor.from_row_lengths(tf.constant([1.0, 2.0, 3.0]), tf.constant([2, 0, 1], tf.int32))
    flat = flat_outputs([ragged, tf.constant([4.0])], ["a", "b"])
    assert {name: value.numpy().tolist() for name, value in flat.items()} == {
        "a": [1, 2, 3], "a_row_splits": [0, 2, 2, 3], "b": [4],
    }  # fmt: skip
    assert flat["a_row_splits"].dtype == tf.int64
    own = {"serving_default": fr.Signature(lambda inputs: inputs, {})}
    assert default_signatures(types.SimpleNamespace(serving_signatures=lambda: own)) is own


def own(call, **inputs):
    """Returns a signature "s" of a call, for fr.export."""
    return {"signatures": {"s": fr.Signature(call, inputs or {"x": tf.TensorSpec([None, 2])})}}


def of_strange_models():
    """Yields models that no export can have, with the words of the refusal and options of fr.export."""
    yield "not a functional Keras model. Use export", keras.Sequential([keras.layers.Dense(1)]), {}
    unborn = keras.Sequential([keras.layers.Dense(1)])
    yield "did not exist before the export", unborn, own(lambda inputs: {"y": unborn(inputs["x"])})
    dense = keras.Sequential([keras.layers.Dense(1, bias_initializer=keras.initializers.Constant(np.nan))])
    dense.build([None, 2])
    yield "dense weight '.*dense.*bias:0' is not finite. Load", dense, own(lambda inputs: {"y": dense(inputs["x"])})
    inputs = keras.Input([None], dtype=tf.int64, name="f", ragged=True), keras.Input([1], name="f_row_splits")
    split = fr.FeatureConfig("f", fr.TableConfig("splits", 2, fr.optimizers.SGD(0.1)), combiner="sum")
    output = keras.layers.Concatenate()([fr.FusedEmbedding([split])({"f": inputs[0]})["f"], inputs[1]])
    words = "two inputs of 'splits' have the name 'f_row_splits' in a signature"
    yield words, keras.Model(inputs, output, name="splits"), {}
    table, feature = fr.TableConfig("twice", 2, fr.optimizers.SGD(0.1)), fr.FeatureConfig("x", "twice")
    inputs = {"x": keras.Input([], dtype=tf.int64, name="x")}
    rows = [fr.FusedEmbedding([feature], [table], name=name)(inputs)["x"] for name in ("one", "two")]
    yield "two layers of 'both' have a table 'twice'", keras.Model(inputs, rows, name="both"), {}


def test_refusals(click, tmp_path):
    (tmp_path / "here").mkdir()
    with pytest.raises(ValueError, match=r"folder '.*here' exists. Use another folder"):
        fr.export(click.model, tmp_path / "here")
    cases = [(r"ops is 'theirs', must be one of \('stock', 'ours'\). Use", click.model, {"ops": "theirs"})]
    for name in ("home-town", "größe", "a b", "1a", "self", "_a"):
        words = f"the name of an input of signature 's' must .* got '{name}'. Rename it"
        cases.append((words, click.model, own(lambda inputs: {"y": 1}, **{name: tf.TensorSpec([None])})))
    for name in ("", "name", "versions"):
        words = f"the name '{name}' of a signature is empty or an attribute"
        cases.append((words, click.model, {"signatures": {name: fr.Signature(lambda inputs: {"y": 1}, {})}}))
    for words, model, options in (*cases, *of_strange_models()):
        with pytest.raises(ValueError, match=words):
            fr.export(model, tmp_path / "served", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


def exported(folder):
    """Body: trains on this rank's batches and exports. Returns the models' answers."""
    rank = fr.rank()
    model = click_model.make_model()
    fr.collectives.broadcast_variables(model.variables)
    click_model.train(model, [2 * step + rank for step in range(4)])
    fr.export(model, f"{folder}/native")
    answers = {name: output.numpy() for name, output in model(click_model.batch(3), training=False).items()}
    table = fr.TableConfig("item", 2, keras.optimizers.legacy.SGD(0.1), fr.Uniform(-1.0, 1.0))
    inputs = {"x": keras.Input([], dtype=tf.int64, name="x")}
    embedding = fr.FusedEmbedding([fr.FeatureConfig("x", "item")], [table], backend="tfra", key_encoding="hash")
    of_tfra = keras.Model(inputs, keras.layers.Dense(1)(embedding(inputs)["x"]))
    of_tfra.compile(fr.collectives.distributed_optimizer(keras.optimizers.legacy.SGD(0.1)), "mse")
    fr.collectives.broadcast_variables(of_tfra.variables)
    own = TFRA_IDS[rank::2]
    of_tfra.fit({"x": own}, np.ones([len(own), 1]), batch_size=len(own), verbose=0)
    fr.export(of_tfra, f"{folder}/tfra")
    outputs = of_tfra({"x": tf.constant(TFRA_IDS)}, training=False).numpy()
    try:
        fr.export(of_tfra, f"{folder}/tfra")
    except (ValueError, RuntimeError) as error:
        return answers, outputs, str(error)


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, run_ranks(exported, 2, folder=str(folder))


def test_rows_of_all_ranks(of_two_ranks):
    folder, results = of_two_ranks
    loaded = {backend: tf.saved_model.load(str(folder / backend)) for backend in ("native", "tfra")}
    got = loaded["native"].signatures["serving_default"](**click_model.served(click_model.batch(3)))
    (of_tfra,) = loaded["tfra"].signatures["serving_default"](x=tf.constant(TFRA_IDS)).values()
    assert [len(ids) for ids, _ in applying.read_tables(folder / "tfra").values()] == [len(TFRA_IDS)]
    for answers, outputs, refusal in results:
        assert "exists. Use" in refusal  # on every rank, though rank 0 alone writes
        for name, value in answers.items():
            np.testing.assert_allclose(got[name], value, **CLOSE)
        np.testing.assert_allclose(of_tfra, outputs, **CLOSE)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_all_ranks_are_gathered_once_also_from_replicas(dtype, replicas, tmp_path, monkeypatch):
    ids = np.array([7, -3, 2**62, 0, 5, click_model.LIMITS.min])
    numbers = np.arange(12).reshape(6, 2).astype(tf.as_dtype(dtype).as_numpy_dtype)
    monkeypatch.setattr(collectives, "size", lambda: 2)
    for rank in range(2):
        held = slice(None) if replicas == 2 else slice(rank, None, 2)
        layout = types.SimpleNamespace(replicas=types.SimpleNamespace(size=replicas), piece=rank)
        embedding = types.SimpleNamespace(export_table=lambda _, held=held: (ids[held], numbers[held]), layout=layout)
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        write_rank_rows(tmp_path, embedding, "item")
    found, got = read_all_rows(tmp_path, "item", dtype)
    order = np.argsort(ids)
    np.testing.assert_array_equal(found, ids[order])
    assert got.dtype == numbers.dtype
    np.testing.assert_array_equal(got, numbers[order])


def test_refusals_of_a_delta(click, tmp_path):
    model = click.model
    shutil.copytree(click.folder / "stock", tmp_path / "base")
    shutil.copytree(click.folder / "stock-delta", tmp_path / "delta")
    delta, fine, ours = tmp_path / "delta", tmp_path / "base", click.folder / "ours"
    fr.apply_delta(fine, delta, tmp_path / "next")
    with pytest.raises(ValueError, match="'.*ours' has .*'ours'.*, but the model to export has .*'stock'.*a full exp"):
        fr.export(model, tmp_path / "other", base=ours)
    with pytest.raises(ValueError, match=r"base '.*delta' is a delta. Use the full export that apply_delta builds"):
        fr.export(model, tmp_path / "other", base=delta)
    with pytest.raises(ValueError, match="is not an export"):
        fr.export(model, tmp_path / "other", base=tmp_path)
    cases = {
        "exists. Use another folder": (fine, delta, fine),
        "holds no delta.json. Use": (fine, fine, tmp_path / "out"),
        "does not start from base '.*next': the base has {'version': .*Use": (tmp_path / "next", delta),
        "does not start from base '.*ours': the base has": (ours, delta),
    }
    for message, (base, given, *output) in cases.items():
        with pytest.raises(ValueError, match=message):
            fr.apply_delta(base, given, *(output or [tmp_path / "out"]))
    changed = delta / "changes" / "item.removed.npy"
    changed.unlink()
    np.save(changed, np.array([1, 2]))
    with pytest.raises(ValueError, match="file '.*item.removed.npy' is damaged: it has .* bytes"):
        fr.apply_delta(fine, delta, tmp_path / "out")
    described = json.loads((fine / "assets.extra/tables.json").read_text(encoding="utf-8"))
    (fine / "assets.extra/tables.json").write_text(json.dumps({**described, "format": 0}), encoding="utf-8")
    with pytest.raises(ValueError, match="tables.json' has format 0, want 2 or 3. Use a full export"):
        fr.export(model, tmp_path / "other", base=fine)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "delta", "next"]
