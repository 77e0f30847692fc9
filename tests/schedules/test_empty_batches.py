"""A batch without samples changes nothing: ranks that have data in turns train as one process with all of it."""

import functools

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.schedules.clicks import joined
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec.schedules.uneven_batches import Guard

pytestmark = pytest.mark.legacy

# Samples of each step, of one rank alone: step i is a batch of rank i % R. The last has fewer than micro-batches.
SAMPLES = (5, 6, 4, 7, 5, 1)
# By kind of model, its schedule's equal on one process.
REFERENCES = {
    "sync": "sync", "dual_buffer": "sync", "nested": "frozen_window", "semi_async": "semi_async",
    "accumulated": "accumulated", "step_of_instance": "semi_async",
}  # fmt: skip


class Means(keras.layers.Layer):
    """Divides by the number of samples in a loss and a metric, and counts its calls in two kinds of variables."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = self.add_weight("calls", [], initializer="zeros", trainable=False)
        self.more_calls = tf.Variable(0, trainable=False)

    def call(self, inputs, training=None):
        if training:
            self.calls.assign_add(1.0)
            self.more_calls.assign_add(1)
        self.add_loss(0.1 * tf.reduce_mean(tf.square(inputs)))
        self.add_metric(tf.reduce_mean(inputs), name="mean", aggregation="mean")
        return inputs - tf.stop_gradient(tf.reduce_mean(inputs, axis=0))


def make_model(kind):
    from tf_fusedrec import collectives, schedules

    class Own(schedules.PipelinedModel):
        def __init__(self, inner, embedding, **kwargs):
            super().__init__(**kwargs)
            self.inner, self.embedding = inner, embedding

        def call(self, x, training=None):
            return self.inner(x, training=training)

        def embedding_inputs(self, x):
            return [schedules.EmbeddingCall(self.embedding, {name: x[name] for name in ("item", "past")})]

        def get_layer(self, name):
            return self.inner.get_layer(name)

    def own_step(self, data):
        """Logs the loss of the batch, which is no metric."""
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}

    class OwnStep(Own):
        train_step = own_step

    layouts = {
        "dual_buffer": schedules.DualBuffer(),
        "nested": schedules.Nested(2),
        "frozen_window": schedules.FrozenWindow(2),
    }
    keras.utils.set_random_seed(3)
    embedding = fr.FusedEmbedding(
        [fr.FeatureConfig("item", "item"), fr.FeatureConfig("past", "item", combiner="mean")],
        [fr.TableConfig("item", 4, fr.optimizers.Adagrad(0.1), initializer=fr.Uniform(-1, 1))],
        accumulate_steps=2 if kind == "accumulated" else 1,
        name=f"embedding_{kind}",
    )
    inputs = {
        "item": keras.Input([], dtype=tf.int64, name="item"),
        "past": keras.Input([None], dtype=tf.int64, ragged=True, name="past"),
        "numbers": keras.Input([4], name="numbers"),
    }
    rows = embedding({name: inputs[name] for name in ("item", "past")})
    hidden = keras.layers.BatchNormalization(name="norm")(inputs["numbers"])
    hidden = keras.layers.Concatenate()([hidden, *rows.values()])
    hidden = keras.layers.GroupNormalization(groups=3)(keras.layers.LayerNormalization()(hidden))
    hidden = Means(name="means")(hidden)
    hidden = hidden + 0.0 * keras.layers.Dropout(0.5)(hidden)  # ranks draw other masks
    # Its state follows from weights, and it assigns weights: a step without samples is a step like any other.
    hidden = keras.layers.SpectralNormalization(keras.layers.Dense(6, activation="tanh", use_bias=False))(hidden)
    outputs = keras.layers.Dense(1)(keras.layers.BatchNormalization()(hidden))
    optimizer = collectives.distributed_optimizer(keras.optimizers.AdamW(0.05, weight_decay=0.01))
    if REFERENCES.get(kind, kind) == "semi_async":
        own = OwnStep if kind == "semi_async" else Own
        model = own(keras.Model(inputs, outputs), embedding, schedule=schedules.SemiAsync())
        if own is Own:
            model.train_step = functools.partial(own_step, model)
    else:
        model = schedules.PipelinedModel(inputs, outputs, schedule=layouts.get(kind, "sync"))
    if kind == "dual_buffer":
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer)
    # Objects have their variables. Those that the first trace makes would cost a second trace.
    metrics = [keras.metrics.MeanAbsoluteError("mae"), keras.metrics.MeanSquaredError("of_object")]
    model.compile(optimizer, "mse", weighted_metrics=metrics)
    model(step_data(0)[0], training=False)  # makes weights of OwnStep
    return model, embedding


def step_data(step, samples=None):
    """The batch of a step, or one of no samples in its form."""
    random = np.random.default_rng(step)
    size = SAMPLES[step]
    lengths = random.integers(0, 4, size)
    past = tf.RaggedTensor.from_row_lengths(tf.constant(random.integers(0, 12, lengths.sum())), lengths)
    x = {
        "item": tf.constant(random.integers(0, 12, size)),
        "past": past,
        "numbers": tf.constant(random.normal(3, 2, [size, 4]), tf.float32),
    }
    y = tf.constant(random.normal(size=[size, 1]), tf.float32)
    return tf.nest.map_structure(lambda part: part[:samples], (x, y))


def fit(kinds):
    """Body: by kind, what a fit over SAMPLES leaves on this rank."""
    rank, size, results = fr.rank(), fr.size(), {}

    def batches():
        for step in range(len(SAMPLES)):
            yield step_data(step, None if step % size == rank else 0)

    signature = (
        {
            "item": tf.TensorSpec([None], tf.int64),
            "past": tf.RaggedTensorSpec([None, None], tf.int64, 1, tf.int64),
            "numbers": tf.TensorSpec([None, 4], tf.float32),
        },
        tf.TensorSpec([None, 1], tf.float32),
    )
    for kind in kinds:
        model, embedding = make_model(kind)
        data = tf.data.Dataset.from_generator(batches, output_signature=signature)
        moving, calls, losses = [], [], []  # after each step, because ranks share their state at the end of the epoch

        def keep(_, logs, model=model, moving=moving, calls=calls, losses=losses):
            moving.append(model.get_layer("norm").moving_mean.numpy())
            means = model.get_layer("means")
            calls.append([int(means.calls), int(means.more_calls)])
            losses.append(logs["loss"])

        callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=keep)]
        history = model.fit(data, steps_per_epoch=len(SAMPLES), callbacks=callbacks, verbose=0).history
        results[kind] = {
            "weights": [weight.numpy() for weight in model.trainable_weights if weight.shape.rank],
            "rows": embedding.export_table("item"),
            "history": {name: values[0] for name, values in history.items()},
            "losses": losses,
            "moving": moving[-1],
            "calls": calls[-1],
            "scale": float(getattr(model.optimizer, "loss_scale", 0)),
            "evaluated": model.evaluate(data, steps=len(SAMPLES), verbose=0) if kind == "sync" else [],
            "finite": all(np.isfinite(weight.numpy()).all() for weight in model.weights),
        }
    return results


@pytest.fixture(scope="module")
def trained():
    """By number of ranks, the results of each rank."""
    kinds = {1: sorted(set(REFERENCES.values())), 2: list(REFERENCES)}
    return {ranks: run_ranks(fit, ranks, timeout_s=600, kinds=of_ranks) for ranks, of_ranks in kinds.items()}


@pytest.mark.parametrize("kind", REFERENCES)
def test_ranks_that_have_data_in_turns_train_as_one_process(trained, kind):
    of_ranks = [one[kind] for one in trained[2]]
    expected = trained[1][0][REFERENCES[kind]]
    for of_rank in of_ranks:
        # Sums of float32 in another order, through six steps of Adam; weights and rows are of the order of 1.
        for weight, of_one in zip(of_rank["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(weight, of_one, atol=1e-4)
        assert of_rank["history"] == pytest.approx(expected["history"], abs=1e-4)
        assert of_rank["finite"] and np.isfinite(of_rank["losses"]).all() and np.isfinite(of_rank["evaluated"]).all()
        assert of_rank["scale"] in (0, 2.0**15)  # Keras' initial scale, which no step has lowered
    ids, rows = joined([of_rank["rows"] for of_rank in of_ranks])
    np.testing.assert_array_equal(ids, expected["rows"][0])
    np.testing.assert_allclose(rows, expected["rows"][1], atol=1e-4)


@pytest.mark.parametrize("kind", REFERENCES)
def test_the_state_of_a_rank_follows_its_own_samples(trained, kind):
    """A moving average and two counters, by NumPy. A micro-batch is a call of its own, if it has samples."""
    of_ranks = [one[kind] for one in trained[2]]
    for of_job in ([trained[1][0][REFERENCES[kind]]], of_ranks):
        for rank, of_rank in enumerate(of_job):
            steps = range(rank, len(SAMPLES), len(of_job))
            pieces = [min(2, SAMPLES[step]) if REFERENCES[kind] == "frozen_window" else 1 for step in steps]
            assert of_rank["calls"] == [sum(pieces)] * 2
            if sum(pieces) == len(steps):
                moving = np.zeros(4)
                for step in steps:
                    moving = 0.99 * moving + 0.01 * step_data(step)[0]["numbers"].numpy().mean(0)
                np.testing.assert_allclose(of_rank["moving"], moving, rtol=1e-5)


def test_a_synchronised_normalization_without_samples_on_any_rank_keeps_its_statistics():
    layer = fr.layers.SyncBatchNormalization()
    layer(tf.constant([[1.0, 5.0], [3.0, 9.0]]), training=True)
    before = layer.get_weights()
    assert np.all(before[2] > 0)
    layer(tf.zeros([0, 2]), training=True)
    np.testing.assert_array_equal(layer.get_weights(), before)


def test_rows_that_belong_to_no_sample_get_no_gradient_of_an_empty_batch():
    table = fr.TableConfig("item", 4, fr.optimizers.SGD(0.1))
    model = fr.schedules.PipelinedModel()
    model.embedding = fr.FusedEmbedding([fr.FeatureConfig("item", "item")], [table])
    with Guard(model, tf.zeros([0, 2])):
        with tf.GradientTape() as tape:
            rows = model.embedding({"item": tf.range(3)})["item"]
            loss = tf.reduce_sum(rows) * tf.reduce_mean(tf.zeros([0]))  # NaN
        before = model.embedding.export_table("item")[1]
        tape.gradient(loss, model.embedding.trainable_variables)
    assert model.embedding.statistics()["item"]["left_out"] == 0
    np.testing.assert_array_equal(model.embedding.export_table("item")[1], before)
