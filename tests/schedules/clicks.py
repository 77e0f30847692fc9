"""The model of these tests and its data: a plain, a ragged and a weighted pooled feature."""

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import keras, optimizers, tf
from tf_fusedrec._tf_compat import keras_api, unconverted
from tf_fusedrec.schedules import PipelinedModel
from tf_fusedrec.schedules.model import make_optimizer_slots

DIM, UNITS = 4, 8


def make_embedding(rule="Adam", table=None, user=(), **layer):
    table = {"optimizer": getattr(optimizers, rule)(0.1), "initializer": fr.Uniform(-1, 1), **(table or {})}
    return fr.FusedEmbedding(
        [
            fr.FeatureConfig(name="item", table="item"),
            fr.FeatureConfig(name="past", table="item", combiner="mean"),
            fr.FeatureConfig(name="user", table="user"),
        ],
        [fr.TableConfig("item", DIM, **table), fr.TableConfig("user", DIM, **{**table, **dict(user)})],
        **layer,
    )


def make_model(
    embedding, schedule="sync", optimizer=None, features=("item", "past", "user"), regularizer=None, **compiled
):
    """Returns a functional model, with equal dense weights each time."""
    keras.utils.set_random_seed(3)
    inputs = {
        "item": keras.Input([], dtype=tf.int64, name="item"),
        "past": keras.Input([None], dtype=tf.int64, ragged=True, name="past"),
        "user": keras.Input([], dtype=tf.int64, name="user"),
    }
    inputs = {name: inputs[name] for name in features}
    rows = embedding(inputs)
    hidden = keras.layers.Dense(UNITS, activation="tanh", kernel_regularizer=regularizer)
    hidden = hidden(keras.layers.Concatenate()(list(rows.values())))
    model = PipelinedModel(inputs, keras.layers.Dense(1)(hidden), schedule=schedule)
    # This metric has its variables. Variables that the first trace makes would cost a second trace.
    compiled = {"loss": "mse", "weighted_metrics": [keras.metrics.MeanAbsoluteError("mae")], **compiled}
    model.compile(optimizer or keras.optimizers.Adam(0.01), **compiled)
    return model


def fit(model, data, after_batch, **arguments):
    """Fits a model, and calls `after_batch` with the number and the logs of each batch."""
    listener = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: after_batch(batch, logs))
    return model.fit(data, verbose=0, callbacks=[listener], **arguments)


def reset_function(model, embedding):
    """Returns a function that gives the model its present weights and slots again, and its tables no rows.

    A model that is fitted again costs a fortieth of another one, because it keeps its traced step.
    """
    make_optimizer_slots(model)
    tables = [group.table for group in embedding.internals.groups]
    variables = [
        *model.variables,
        *keras_api.optimizer_variables(model.optimizer),
        *[table.optimizer.iterations for table in tables],
    ]
    variables = [keras_api.tf_variable(variable) for variable in variables]  # a list of weights would have rows
    values = [variable.numpy() for variable in variables]

    def reset():
        model.drain()
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        for table in tables:
            table.clear()
            table.clock = 0

    return reset


def batch(samples, seed):
    """Returns (x, y, sample_weight) of random clicks."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 4, samples)
    x = {
        "item": tf.constant(random.integers(0, 12, samples)),
        "past": tf.RaggedTensor.from_row_lengths(tf.constant(random.integers(0, 12, lengths.sum())), lengths),
        "user": tf.constant(random.integers(0, 30, samples)),
    }
    y, weights = random.normal(size=samples), random.uniform(0.5, 2, samples)
    return x, tf.constant(y, tf.float32), tf.constant(weights, tf.float32)


def signature(features=("item", "past", "user")):
    """The signature of batches with these features and any number of samples, for one traced step."""
    specs = {
        "item": tf.TensorSpec([None], tf.int64),
        "past": tf.RaggedTensorSpec([None, None], tf.int64, 1, tf.int64),
        "user": tf.TensorSpec([None], tf.int64),
    }
    return ({name: specs[name] for name in features}, *[tf.TensorSpec([None], tf.float32)] * 2)


SIGNATURE = signature()


def last_layer_reduced_early(ops):
    """Returns whether the sum of the last layer's gradient may run before the first layer's gradient exists."""
    from tests.support.graphs import ancestors
    from tf_fusedrec.exchange.collectives import SUMS

    def of_shape(kinds, shape):
        return [op for op in ops if op.type in kinds and op.outputs[0].shape == shape]

    first, last = of_shape(["MatMul"], (3 * DIM, UNITS)), of_shape(SUMS, (UNITS, 1))
    assert len(last) == 1 and first, "the model is another one"
    return first[-1] not in ancestors(last[0])


def train_function(model):
    make_optimizer_slots(model)
    return tf.function(unconverted(lambda *data: model.train_step(data)), input_signature=SIGNATURE)


def state(model, embedding):
    """Returns the trained state as arrays: dense weights, their slots, and records by ascending id."""
    dense = [*model.trainable_weights, *keras_api.optimizer_variables(model.optimizer)]
    return {**{f"dense {i}": weight.numpy() for i, weight in enumerate(dense)}, **records(embedding)}


def records(embedding):
    """Returns the records of all tables as arrays, by ascending id."""
    arrays = {}
    for group in embedding.internals.groups:
        for name in group.table.names:
            ids, of_table = group.table.snapshot(name)
            order = np.argsort(ids)
            arrays[f"{name} ids"] = ids[order]
            arrays.update({f"{name} {field}": of_table[field][order] for field in of_table.dtype.names})
    return arrays


def joined(tables):
    """Returns ids and rows of all ranks, by ascending id, from those that each rank exports."""
    ids, rows = (np.concatenate(arrays) for arrays in zip(*tables))
    return np.sort(ids), rows[np.argsort(ids)]


def assert_same(got, wanted, but=(), where=""):
    """Compares two states bit by bit, without the fields `but` of records."""
    assert got.keys() == wanted.keys()
    for what in wanted:
        if what.split()[-1] not in but:
            np.testing.assert_array_equal(got[what], wanted[what], err_msg=f"{where} {what}")
