"""A checkpoint's SavedModel equals its model in this process. test_train.py checks it in another process."""

import atexit
import contextlib
import functools
import pathlib
import shutil
import tempfile

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.models import experiments
from tests.models.batches import START, ragged, ranking_batch
from tests.support.graphs import saved_operations
from tf_fusedrec import keras, tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.models.build import make_embedding, make_model
from tf_fusedrec.models.data_sets.strings import STRINGS, write_strings
from tf_fusedrec.models.experiment import from_dict
from tf_fusedrec.models.export import export, signatures_of, trained_model
from tf_fusedrec.models.item_index import IndexOptions
from tf_fusedrec.models.run_signature import run_signature
from tf_fusedrec.models.saved_run import saved_experiment

ITEMS = np.arange(1, 21)
STRANGE = ("Fusedrec>", "TFRA>", "Horovod")  # operations that a server with TensorFlow alone lacks
ENCODERS = {
    "hstu": {},
    "fuxi_alpha": {"encoder": "fuxi_alpha", "whole_catalogue": True},
    "sasrec": {"encoder": "sasrec"},  # with an index
}
TEXTS = {7: "B07", 20: "café"}  # of items; the others have their ids
INDEX = IndexOptions(share=0.6, lists=4)


def trained(fields, batch):
    """Returns a model after one step and its experiment. A step that is not traced costs less."""
    experiment = from_dict(fields)
    keras.utils.set_random_seed(3)
    model = make_model(experiment, make_embedding(experiment), ITEMS, np.ones(len(ITEMS), np.int64))
    model.compile(keras.optimizers.Adam(0.1))
    model.train_step(batch)
    return experiment, model


def exported(folder, experiment, model, index=None):
    extra = {"experiment": experiment.to_dict(), "items": len(ITEMS)}
    fr.checkpoint.save(folder / "checkpoint", model, model.optimizer, extra=extra)
    if index is None:  # Data without texts give answers of ids only.
        write_strings(folder / STRINGS, {"item": TEXTS, "user_id": {20: "ann"}})
    export(trained_model(folder / "checkpoint"), folder / "saved_model", index=index, data=folder)
    return str(folder / "saved_model")


def ranking_batches():
    """Returns a batch, and what the model takes of it: 20 of 25 events."""
    batch = ranking_batch(histories=[25, 0, 3], exposures=[2, 4, 1])
    cut = {**batch}
    for name in ("history_item", "history_action", "history_time"):
        cut[name] = jagged.last(batch[name], 20)
    return batch, cut


def retrieval_batch():
    return {
        "item_id": ragged([20, 3], [*ITEMS, 4, 5, 6]),
        "timestamp": ragged([20, 3], [*(START + 60 * ITEMS), START, START + 5, START + 9]),
    }


@functools.cache
def exported_once(name):
    """Returns a model and the path of its SavedModel, which every test of this process shares.

    name: A kind of ranking models, or a name in ENCODERS.
    """
    if name in ENCODERS:
        fields = {**experiments.RETRIEVAL, "model": {**experiments.RETRIEVAL["model"], **ENCODERS[name]}}
        experiment, model = trained(fields, retrieval_batch())
    else:
        experiment, model = trained(experiments.ranking(name), ranking_batches()[1])
    folder = pathlib.Path(tempfile.mkdtemp(prefix="exported-"))
    atexit.register(shutil.rmtree, folder)
    return model, exported(folder, experiment, model, INDEX if name == "sasrec" else None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grm", "din", "dcn"])
def test_ranking_scores(kind):
    model, path = exported_once(kind)
    batch, cut = ranking_batches()
    inputs = {"user_budget": batch["user_budget"].numpy()}
    for group, names in (("history", ("item", "action", "time")), ("exposed", ("item", "time"))):
        inputs[f"{group}_row_splits"] = batch[f"{group}_item"].row_splits.numpy()
        inputs.update({f"{group}_{name}": batch[f"{group}_{name}"].values.numpy() for name in names})
    assert not {op for op in saved_operations(path) if op.startswith(STRANGE)}
    scores = run_signature(path, "serving_default", inputs)
    for task, logit in model(cut).items():
        # The float32 weights are equal, so only the order of summation may differ.
        np.testing.assert_allclose(scores[task], tf.sigmoid(logit), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ENCODERS)
def test_retrieval_embeds_and_finds_the_best_unseen_items(encoder):
    model, path = exported_once(encoder)
    assert not {op for op in saved_operations(path) if op.startswith(STRANGE)}
    inputs = {
        "item_id": np.array([4, 5, 6, 2, 999]),  # 999 is unknown
        "timestamp": START + np.arange(5) * 100,
        "row_splits": np.array([0, 3, 5, 5]),
        "query_time": START + np.array([400, 900, 900]),
    }
    signatures = tf.saved_model.load(path).signatures
    constants = {name: tf.constant(value) for name, value in inputs.items()}
    users = signatures["serving_default"](**constants)["user_embedding"].numpy()
    known = [column[:1] for column in (ragged([3, 2, 0], inputs["item_id"]), ragged([3, 2, 0], inputs["timestamp"]))]
    expected = model.embed_users(*known, tf.constant(inputs["query_time"][:1]))
    np.testing.assert_allclose(users[:1], expected, atol=1e-6)  # float32, other order of summation
    assert not users[2].any()  # no history

    best = {name: value.numpy() for name, value in signatures["top_k"](**constants, k=tf.constant(15)).items()}
    every = signatures["top_k"](**constants, k=tf.constant(len(ITEMS)))["ids"].numpy()
    assert [np.sum(row == -1) for row in every] == [3, 1, 0]  # the items of the history
    shown = [[TEXTS.get(item, str(item)) if item > 0 else "" for item in row] for row in best["ids"].tolist()]
    if encoder == "sasrec":
        assert "items" not in best
    else:
        assert [[text.decode() for text in row] for row in best["items"].tolist()] == shown
    scores = users @ model.embed_items(tf.constant(ITEMS)).numpy().T
    for row, seen in enumerate([[4, 5, 6], [2], []]):
        unseen = [item for item in ITEMS if item not in seen]
        assert not set(best["ids"][row]) & set(seen)
        by_score = sorted((scores[row, item - 1] for item in unseen), reverse=True)[:15]
        np.testing.assert_allclose(best["scores"][row], by_score, atol=1e-6)


@pytest.mark.slow
def test_an_index_is_part_of_the_version(tmp_path):
    """A server takes the index of a delta's rows from the delta, as does the full export that the delta makes."""
    base = pathlib.Path(exported_once("sasrec")[1])
    model = trained_model(base.parent / "checkpoint")
    vectors = np.random.default_rng(0).normal(size=(20, model.config.dim)).astype(np.float32)
    fr.checkpoint.warm_start(model, "item", ITEMS, vectors)
    export(model, tmp_path / "delta", index=INDEX, base=base)
    fr.apply_delta(base, tmp_path / "delta", tmp_path / "2")  # has the graph of a new export
    first, second = (tf.saved_model.load(str(path)) for path in (base, tmp_path / "2"))
    inputs = {"item_id": ITEMS[:3], "timestamp": START + ITEMS[:3], "row_splits": [0, 3], "query_time": [START + 9]}
    inputs = {name: tf.constant(value, tf.int64) for name, value in inputs.items()}

    def ask(loaded):
        return loaded.signatures["top_k_ivf"](**inputs, k=tf.constant(12))

    before, wanted = ask(first), ask(second)
    first.signatures["apply_delta"](path=tf.constant(str(tmp_path / "delta")))
    for name, value in ask(first).items():
        np.testing.assert_array_equal(value, wanted[name])
        assert (value != before[name]).numpy().any()
    exact = second.signatures["top_k"](**inputs, k=tf.constant(12))
    found = wanted["ids"].numpy()[0]
    assert 1 <= (found >= 0).sum() < 12  # At most 12 - 4 products are left for items.
    assert not set(found) & {1, 2, 3}
    of_exact = dict(zip(exact["ids"].numpy()[0], exact["scores"].numpy()[0]))
    for id_, score in zip(found, wanted["scores"].numpy()[0]):
        assert id_ < 0 or id_ not in of_exact or score == pytest.approx(of_exact[id_], abs=1e-6)
    with pytest.raises(ValueError, match="an index needs a retrieval model, got GRM"):
        signatures_of(exported_once("grm")[0], index=INDEX)


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["", "texts", "columns"])
def test_a_delta_keeps_the_texts_of_answers_and_the_columns_of_requests(tmp_path, changed):
    base = pathlib.Path(exported_once("hstu")[1])
    model = trained_model(base.parent / "checkpoint")
    write_strings(tmp_path / STRINGS, {"item": {**TEXTS, **({7: "B08"} if changed == "texts" else {})}})
    experiment = saved_experiment(base.parent / "checkpoint") if changed == "columns" else None
    refused = pytest.raises(ValueError, match="in assets, such as the columns of requests, .* a catalog, its texts or")
    with refused if changed else contextlib.nullcontext():
        export(model, tmp_path / "delta", base=base, data=tmp_path, experiment=experiment)
    assert (tmp_path / "delta").exists() != bool(changed)


@pytest.mark.slow
def test_serve_names_signatures_and_inputs():
    _, path = exported_once("grm")
    with pytest.raises(ValueError, match=r"no signature 'top_k', it has \[.*'serving_default', 'version'\]. Pass one"):
        run_signature(path, "top_k", {})
    with pytest.raises(ValueError, match=r"inputs are .*, 'serving_default' wants \['exposed_item'.*Pass exactly"):
        run_signature(path, "serving_default", {"x": np.zeros(1)})
