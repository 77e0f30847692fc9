"""Trains, saves and exports the reference models under one Keras, and reads what the other Keras wrote.

    TF_USE_LEGACY_KERAS=0 python -m tests.keras_3.model_program write:OWN_FOLDER read:FOLDER_OF_THE_OTHER

Prints JSON: by model, the largest differences between what the other Keras wrote and this Keras reads. programs.py
compares the training of the same models.
"""

import json
import pathlib
import re
import sys

import numpy as np

import tf_fusedrec as fr
from tests.models import experiments
from tests.models.batches import of_any_size, ragged, ranking_batch, retrieval_batch
from tf_fusedrec import keras, tf
from tf_fusedrec._tf_compat import keras_api
from tf_fusedrec.checkpoint.dense import ordered_weights
from tf_fusedrec.models.build import make_embedding, make_model
from tf_fusedrec.models.experiment import from_dict
from tf_fusedrec.models.export import export
from tf_fusedrec.models.serve.loaded import Export

ITEMS = np.arange(1, 61)
GRM_OPTIONS = {"group_norm": True, "cross_layers": 2, "crosses": ["item*hour"]}
FIELDS = {
    **{kind: experiments.ranking(kind) for kind in ("grm", "dlrm", "din", "dcn")},
    "grm with crosses": experiments.ranking("grm") | {"model": experiments.RANKING["model"] | GRM_OPTIONS},
    "user states": experiments.ranking("grm") | {"model": experiments.RANKING["model"] | {"causal_context": True}},
    **{
        encoder: experiments.RETRIEVAL | {"model": {**experiments.RETRIEVAL["model"], "encoder": encoder}}
        for encoder in ("hstu", "fuxi_alpha", "fuxi_beta", "sasrec")
    },
}
EXCHANGED = ("grm", "hstu", "dlrm")  # their files are read under the other Keras


def batches(name):
    """The batches of this rank: two on the first, one on the second."""
    if FIELDS[name]["task"] == "ranking":
        both = [ranking_batch([5, 0, 3], [2, 4, 1], seed=1), ranking_batch([2, 7], [3, 1], seed=2)]
    else:
        both = [retrieval_batch([6, 0, 2], seed=1), retrieval_batch([4, 5], seed=2)]
    return both[fr.rank() :]


def made(name, **options):
    """Returns a model with equal weights under both Keras, whose initializers draw different numbers."""
    fields = {**FIELDS[name], "model": {**FIELDS[name]["model"], "dropout": 0.0}}
    experiment = from_dict(fields)
    model = make_model(experiment, make_embedding(experiment), ITEMS, np.ones(len(ITEMS), np.int64))
    # Adam takes whole steps by the rounding of a gradient of 0, which some weights beside norms have.
    optimizer = keras.optimizers.Adam(0.01) if name in EXCHANGED else keras.optimizers.SGD(0.1)
    model.compile(fr.collectives.distributed_optimizer(optimizer), **options)
    model(batches(name)[0])
    for number, weight in enumerate(ordered_weights(model)):
        if weight.trainable and weight.shape.rank:
            weight.assign(np.random.default_rng(number).normal(0, 0.2, weight.shape))
    return model


def train(model, name, steps):
    """Returns the loss of each step."""
    own = batches(name)
    data = tf.data.Dataset.from_generator(lambda: iter(own), output_signature=of_any_size(own[0]))
    return model.fit(data.repeat(), epochs=steps, steps_per_epoch=1, verbose=0).history["loss"]


def answer(folder, name):
    """The answer of the served export to the first batch."""
    served, batch, inputs = Export(folder), batches(name)[0], {}
    for key in served.signatures["serving_default"].inputs:
        column = key.removesuffix("_row_splits")
        if key == "query_time":
            inputs[key] = tf.reduce_max(batch["timestamp"], axis=1) + 60
        elif key == "row_splits":
            inputs[key] = batch["item_id"].row_splits
        elif key in ("history_row_splits", "exposed_row_splits"):
            inputs[key] = batch[f"{column}_item"].row_splits
        else:
            inputs[key] = getattr(batch[key], "values", batch[key])
    return served.call("serving_default", {key: tensor.numpy() for key, tensor in inputs.items()})


def names(layer, path=""):
    """The layers and the name of each weight, by the id of its variable. Keras numbers the layers without names."""
    path = f"{path}/{re.sub(r'^dense_[0-9]+$', 'dense', layer.name)}"
    found = {}
    for inner in layer._flatten_layers(recursive=False, include_self=False):
        found |= names(inner, path)
    for weight in keras_api.own_weights(layer):
        found[id(keras_api.tf_variable(weight))] = f"{path} {keras_api.variable_name(weight).rpartition('/')[2]}"
    return found


def state(model):
    """The weights by their place and name, and the ids and rows by table."""
    name_of = names(model)
    weights = {f"{n} {name_of[id(weight)]}": weight.numpy() for n, weight in enumerate(ordered_weights(model))}
    tables = {table: model.embedding.export_table(table) for table in model.embedding.optimizers}
    return {**weights, **{f"{table} {part}": tables[table][part] for table in tables for part in range(2)}}


def difference(found, wanted):
    assert set(found) == set(wanted)
    return max(float(np.abs(found[name] - wanted[name]).max(initial=0)) for name in wanted)


def wrote(folder, name):
    """Trains and writes files, with the numbers that the other Keras must read from them."""
    model = made(name)
    train(model, name, 3)
    fr.checkpoint.save(folder / "checkpoint", model, model.optimizer)
    export(model, folder / "export")
    np.savez(folder / "state.npz", **state(model))
    np.savez(folder / "answer.npz", **answer(folder / "export", name))
    np.savez(folder / "next.npz", loss=train(model, name, 2))


def read(other, folder, name):
    """Differences between what another Keras wrote and what this Keras reads."""
    model = made(name)
    fr.checkpoint.load(other / "checkpoint", model, model.optimizer)
    differences = {"checkpoint": difference(state(model), np.load(other / "state.npz"))}
    differences["export"] = difference(answer(other / "export", name), np.load(other / "answer.npz"))
    next_losses = {"loss": np.array(train(model, name, 2))}  # the second depends on the moments and the step counts
    differences["slots"] = difference(next_losses, np.load(other / "next.npz"))
    folder.mkdir()
    export(model, folder / "delta", base=other / "export")
    fr.apply_delta(other / "export", folder / "delta", folder / "applied")
    export(model, folder / "whole")
    differences["delta"] = difference(answer(folder / "applied", name), answer(folder / "whole", name))
    served = tf.saved_model.load(str(other / "export"))  # by the other Keras, which takes the delta while it serves
    served.signatures["apply_delta"](path=tf.constant(str(folder / "delta")))
    return differences


def keras_file(folder):
    """The largest change of predictions after model.save, keras.models.load_model, and set_weights of get_weights."""
    embedding = fr.FusedEmbedding(
        [fr.FeatureConfig("history", "item", combiner="mean"), fr.FeatureConfig("user", "item")],
        [fr.TableConfig("item", dim=4, optimizer=fr.optimizers.Adagrad(0.1))],
    )
    inputs = {
        "history": keras.Input([None], dtype="int64", ragged=True, name="history"),
        "user": keras.Input([], dtype="int64", name="user"),
    }
    rows = embedding(inputs)
    score = keras.layers.Dense(1)(keras.layers.Concatenate()([rows["history"], rows["user"]]))
    model = fr.schedules.PipelinedModel(inputs, score, schedule="nested(2)")
    model.compile("sgd", "mse")
    batch = {"history": ragged([2, 0, 1, 3], [1, 2, 3, 4, 5, 6]), "user": tf.constant([7, 8, 9, 1], tf.int64)}
    data = tf.data.Dataset.from_tensors((batch, np.ones([4, 1], np.float32)))
    model.fit(data, verbose=0)
    before, weights = model.predict(data, verbose=0), model.get_weights()
    model.save(folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras")
    assert loaded.schedule == model.schedule
    model.fit(data, verbose=0)
    model.set_weights(weights)
    return max(float(np.abs(m.predict(data, verbose=0) - before).max()) for m in (model, loaded))


def main(*acts):
    results = {}
    for act, _, folder in (act.partition(":") for act in acts):
        for name in EXCHANGED:
            path = pathlib.Path(folder) / name
            if act == "write":
                path.mkdir(parents=True)
                wrote(path, name)
            else:
                results[name] = read(path, path / keras.__name__, name)
        if act == "write":
            results["keras_file"] = keras_file(pathlib.Path(folder))
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
