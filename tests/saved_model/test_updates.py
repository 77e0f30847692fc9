"""Deltas reach a server while it answers: every answer is of one version, and bad deltas change nothing."""

import json
import shutil

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.saved_model import hour
from tests.saved_model.test_damage import changed, flipped
from tests.support.graphs import count_ops
from tf_fusedrec import keras, tf
from tf_fusedrec.saved_model import applying, delta
from tf_fusedrec.saved_model.served_rows import Group

LIMITS = np.iinfo(np.int64)
LAST = {"stock": 3, "ours": 2}  # versions of each kind
ASKED = np.array([LIMITS.min, 0, 1, 2, 3, 4, 5, 6, LIMITS.max])


def make_model():
    tables = [  # '.' is escaped in checkpoints
        fr.TableConfig("a.item", 2, fr.optimizers.SGD(0.5), fr.Normal(0.0, 1.0)),
        fr.TableConfig("b", 2, fr.optimizers.SGD(0.5), unknown="zeros"),
        fr.TableConfig("c", 3, fr.optimizers.SGD(0.5), fr.Uniform(-1.0, 1.0), dtype="bfloat16"),
    ]
    embedding = fr.FusedEmbedding([fr.FeatureConfig(table.name[0], table.name) for table in tables], tables)
    inputs = {name: keras.Input([], dtype=tf.int64, name=name) for name in "abc"}
    rows = embedding(inputs)
    hidden = keras.layers.Concatenate()([rows["a"], rows["b"], rows["c"]])
    model = keras.Model(inputs, keras.layers.Dense(1, name="score")(hidden))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, embedding


def train(model, ids):
    batch = {name: np.array(ids) for name in "abc"}
    model.fit(batch, np.ones(len(ids)), batch_size=len(ids), verbose=0)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """Exports versions in full, and the deltas between them: changed, new and removed rows, ends of int64."""
    folder = tmp_path_factory.mktemp("chain")
    model, embedding = make_model()
    train(model, [0, 1, 2, 3, LIMITS.max])
    for version in (1, 2, 3):
        for ops in ("stock", "ours") if version <= LAST["ours"] else ("stock",):
            fr.export(model, folder / f"{ops}-{version}", ops)
            deltas, base = folder / f"{ops}-deltas", folder / f"{ops}-{version - 1}"
            deltas.mkdir(exist_ok=True)
            if version == 2 and ops == "ours":
                fr.export(model, deltas / "2", ops, base=base)
            elif version > 1:  # the same without a trace
                moved = folder / f"moved-{version}"
                shutil.copytree(folder / f"{ops}-{version}", moved)
                weights = [weight.numpy() for weight in model.variables]
                delta.write_delta(base, moved, deltas / str(version), weights)
        train(model, [1, 4, LIMITS.min] if version == 1 else [2, 5, LIMITS.max])
        for group in embedding.internals.groups:
            for name in group.table.names:
                group.table.remove(name, np.array([version]))
    return folder


def ask(loaded):
    (answer,) = loaded.signatures["serving_default"](**{name: tf.constant(ASKED) for name in "abc"}).values()
    return answer.numpy()


def call(loaded, name, *path):
    told = loaded.signatures[name](*[], **({"path": tf.constant(str(path[0]))} if path else {}))
    return told["version"].numpy().decode(), int(told["deltas"]), int(told["changed_rows"])


def version_in(export):
    return json.loads((export / "assets.extra/tables.json").read_text(encoding="utf-8"))["version"]


@pytest.mark.parametrize("ops", ["stock", "ours"])
def test_a_server_with_deltas_answers_as_full_exports(ops, chain, tmp_path):
    loaded = {v: tf.saved_model.load(str(chain / f"{ops}-{v}")) for v in range(1, LAST[ops] + 1)}
    served = loaded[1]
    assert call(served, "version") == (version_in(chain / f"{ops}-1"), 0, 0)
    answers = [ask(served)]
    for version in range(2, LAST[ops] + 1):
        told = call(served, "apply_delta", chain / f"{ops}-deltas/{version}")
        assert told == call(served, "version")
        assert told[:2] == (version_in(chain / f"{ops}-{version}"), version - 1)
        answers.append(ask(served))
        np.testing.assert_array_equal(answers[-1], ask(loaded[version]))
    assert all((answers[at] != answers[at - 1]).any() for at in range(1, LAST[ops]))
    # A later export skips the deltas before it, and a further call skips all.
    later = loaded[LAST[ops] - 1]
    for _ in range(2):
        assert call(later, "apply_deltas", chain / f"{ops}-deltas")[:2] == (told[0], 1)
        np.testing.assert_array_equal(ask(later), answers[-1])
    # Names in the order of text: the last delta comes first.
    for version in range(2, LAST[ops] + 1):
        shutil.copytree(chain / f"{ops}-deltas/{version}", tmp_path / str(20 - version))
    restarted = tf.saved_model.load(str(chain / f"{ops}-1"))
    assert call(restarted, "apply_deltas", tmp_path) == told
    np.testing.assert_array_equal(ask(restarted), answers[-1])


@pytest.mark.parametrize("ops", ["stock", "ours"])
def test_base_and_delta_are_the_full_export(ops, chain, tmp_path):
    """And the delta holds the changed and removed rows, no others. test_row_formats.py asks the result."""
    delta = chain / f"{ops}-deltas/2"
    fr.apply_delta(chain / f"{ops}-1", delta, tmp_path / "applied")
    before, full, applied = map(applying.read_tables, (chain / f"{ops}-1", chain / f"{ops}-2", tmp_path / "applied"))
    written = {path.name: np.load(path).tolist() for path in (delta / "changes").glob("*.npy")}
    assert set(applied) == {"a.item", "b", "c"}
    for name in applied:
        for got, expected in zip(applied[name], full[name]):
            np.testing.assert_array_equal(got, expected)
        old, now = ({i: row.tobytes() for i, row in zip(of[name][0].tolist(), of[name][1])} for of in (before, full))
        assert written[f"{name}.ids.npy"] == sorted(i for i in now if now[i] != old.get(i))
        assert written[f"{name}.removed.npy"] == [1] and set(old) - set(now) == {1}


def test_bad_deltas_are_refused_by_name_and_change_nothing(chain, tmp_path):
    served = tf.saved_model.load(str(chain / "stock-1"))
    before, copy = ask(served), tmp_path / "delta"
    shutil.copytree(chain / "stock-deltas/2", copy)

    def refused(name, path, words):
        with pytest.raises(tf.errors.OpError, match=words):
            call(served, name, path)
        assert call(served, "version")[1:] == (0, 0)
        np.testing.assert_array_equal(ask(served), before)

    refused("apply_delta", chain / "stock-deltas/3", "stock-deltas/3 starts from version .*, but the server has .*Use")
    refused("apply_delta", tmp_path / "none", "none/server/header")
    refused("apply_deltas", tmp_path / "none", "none holds no delta. Use")
    random = np.random.default_rng(0)
    for path in sorted((copy / "server").iterdir()):
        data = path.read_bytes()
        cases = [b"", data[:-1], data + b"x", *(flipped(data, bit) for bit in random.choice(8 * len(data), 4))]
        for case in [*cases, (chain / "stock-deltas/3/server" / path.name).read_bytes()]:
            changed(path, case)
            # The whole header of another delta is not damaged, but has another base or other files.
            refused("apply_delta", copy, f"file .*{path.name} is damaged. Copy|starts from version")
        path.unlink()
        refused("apply_deltas", tmp_path, path.name)
        path.write_bytes(data)
    assert call(served, "apply_delta", copy)[1] == 1


@pytest.mark.parametrize("where", ["weight", "row"])
def test_a_delta_with_numbers_that_are_not_finite_is_refused(where, chain, tmp_path):
    """A trainer of an earlier version may have written it."""
    moved, folder = tmp_path / "3", tmp_path / "delta"
    shutil.copytree(chain / "stock-3", moved)
    tensors = applying.read_bundle(moved)
    rows = {key for key in tensors if "served_tables" in key}
    key = next(key for key, value in tensors.items() if value.dtype == np.float32 and (key in rows) == (where == "row"))
    tensors[key].flat[0] = np.nan
    weights = [tensors[key] for key in sorted(set(tensors) - rows) if key.startswith("dense_weights")]
    applying.write_bundle(moved, tensors)
    delta.write_delta(chain / "stock-2", moved, folder, weights)
    with pytest.raises(ValueError, match="(?s)delta/.*holds numbers that are not finite. Use"):
        fr.apply_delta(chain / "stock-2", folder, tmp_path / "full")
    served = tf.saved_model.load(str(chain / "stock-2"))
    before = ask(served)
    with pytest.raises(tf.errors.OpError, match="delta holds a weight or a row that is not finite. Use"):
        call(served, "apply_delta", folder)
    np.testing.assert_array_equal(ask(served), before)


def test_a_delta_of_another_model_is_refused(chain, tmp_path):
    """Its base may have equal rows, so the layout decides."""
    version = version_in(chain / "stock-1")
    delta.write_server_changes(tmp_path / "d" / "server", [version, "x" * 32, "y" * 32], [], {}, [np.zeros(1)])
    served = tf.saved_model.load(str(chain / "stock-1"))
    with pytest.raises(tf.errors.OpError, match="of another model: .* Load"):
        call(served, "apply_delta", tmp_path / "d")


def test_a_delta_that_no_server_could_take_is_not_written(tmp_path):
    """Two models differ in a constant only, as after another adapt of statistics."""
    model, _ = make_model()
    train(model, [0, 1, 2])
    inputs = {name: tf.TensorSpec([None], tf.int64) for name in "abc"}

    def write(folder, constant, base=None):
        shift = tf.constant([[constant]])
        signature = fr.Signature(lambda given: {"score": model(given) + shift}, inputs)
        fr.export(model, tmp_path / folder, signatures={"serving_default": signature}, base=base)

    write("1", 0.5)
    write("same", 0.5, tmp_path / "1")
    with pytest.raises(ValueError, match="differs from the model in .* constants.* a running server could not take"):
        write("other", 0.75, tmp_path / "1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "same"]


def test_a_group_of_tables_has_two_searches(chain):
    """One in the loaded rows and one in the changed ones. Tables a and b share a group; c has another dim."""
    operations = count_ops(tf.saved_model.load(str(chain / "stock-1")).signatures["serving_default"])
    assert operations["LowerBound"] == 2 * 2


def test_overlays_against_a_dict():
    """Random deltas for the 64 tables that a mask holds, with the ends of int64."""
    random, group = np.random.default_rng(0), Group(tuple(map(str, range(64))), 1, tf.float32)
    ids = np.array([LIMITS.min, -1, 0, 1, 2**40, LIMITS.max])
    overlay, model = group.empty(), {}
    queries = np.repeat(ids, 64), np.tile(np.arange(64), len(ids))
    for _ in range(6):
        count = random.integers(0, 60)
        of_ids, tables = random.choice(ids, count), random.integers(0, 64, count)
        alive, rows = random.random(count) < 0.7, random.random([count, 1]).astype(np.float32)
        overlay = overlay.after(*map(tf.constant, (of_ids, tables, alive, rows)))
        for entry in reversed(range(count)):  # The first of a delta's entries counts.
            model[of_ids[entry], tables[entry]] = bool(alive[entry]), rows[entry, 0]
        found, at = (tensor.numpy() for tensor in overlay.find(*map(tf.constant, queries)))
        for query, key in enumerate(zip(*queries)):
            assert found[query] == (key in model), key
            if found[query]:
                assert (overlay.alive[at[query]].numpy(), overlay.rows[at[query], 0].numpy()) == model[key]
    assert len(overlay.tables) == len(model)


def test_a_signature_that_goes_around_the_version_is_refused(chain, tmp_path):
    model, _ = make_model()
    weight = model.layers[-1].kernel
    own = fr.Signature(
        lambda _: {"y": tf.raw_ops.ReadVariableOp(resource=weight.handle, dtype=tf.float32)},
        {"x": tf.TensorSpec([], tf.int64)},
    )
    with pytest.raises(ValueError, match="signature 's' uses the variables of weights .*kernel.*Read"):
        fr.export(model, tmp_path / "e", signatures={"s": own})
    with pytest.raises(ValueError, match="signature 'version' has the name of one for updates. Use"):
        fr.export(model, tmp_path / "e", signatures={"version": own})


def test_four_threads_see_whole_versions_where_only_tensorflow_is(tmp_path):
    """The command in hour.py does this for 360 deltas. A version has 8 MB, so 12 that stay have 96."""
    told = hour.follow(tmp_path, hour.write(tmp_path, 16))
    assert told["versions"] > 12
    assert told["grown_mib"] < 60, told
    # The last version as a full export.
    (answer,) = (
        tf.saved_model.load(str(tmp_path / "last"))
        .signatures["serving_default"](x=tf.constant(hour.QUESTION), y=tf.constant(hour.QUESTION))
        .values()
    )
    expected = np.load(tmp_path / "expected.npz")["answers"][-1]
    np.testing.assert_array_equal(answer, expected)
