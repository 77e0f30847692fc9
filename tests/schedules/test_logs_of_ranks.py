"""Logs of fit and evaluate on several ranks, one without data, equal the logs of one process with all samples."""

import numpy as np
import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.legacy

SAMPLES = 23
SHARES = {1: [0, SAMPLES], 3: [0, 17, SAMPLES, SAMPLES]}  # the last rank has no samples


def make(fr, keras, tf, loss, metrics=(), weighted=()):
    """Returns a model of fixed weights: all rates are 0, also in the tables."""
    embedding = fr.FusedEmbedding(
        [fr.FeatureConfig("f", "t")], [fr.TableConfig("t", 4, fr.optimizers.SGD(0.0), fr.Uniform(-2, 2))], name="fixed"
    )  # fmt: skip
    keras.utils.set_random_seed(1)
    inputs = {"f": keras.Input([], dtype=tf.int64, name="f")}
    outputs = keras.layers.Dense(1, "sigmoid")(embedding(inputs)["f"])
    model = fr.schedules.PipelinedModel(inputs, outputs)
    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, loss, metrics=list(metrics), weighted_metrics=list(weighted))
    return model


def logs_of_all():
    """Body: returns the logs of fit and evaluate on this rank, by model."""
    import tf_fusedrec as fr
    from tf_fusedrec import keras, tf
    from tf_fusedrec.metrics import streaming

    rank, size = fr.rank(), fr.size()
    random = np.random.default_rng(2)
    ids, labels = random.integers(0, 9, SAMPLES), (random.random([SAMPLES, 1]) < 0.4).astype(np.float32)
    weights = random.uniform(0.5, 2, SAMPLES).astype(np.float32)
    mine = slice(*SHARES[size][rank : rank + 2])
    data = tf.data.Dataset.from_tensor_slices(({"f": ids[mine]}, labels[mine], weights[mine])).batch(4)

    def mean_of_own(y_true, y_pred):
        return tf.reduce_mean((y_true - y_pred) ** 2)  # NaN without samples

    keras_metrics = [
        "mae", "accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision", thresholds=0.5),
        keras.metrics.RootMeanSquaredError(name="rmse"), streaming.AUC("our_auc"),
    ]  # fmt: skip
    found = {}
    squares = [keras.metrics.MeanSquaredError("mse")]
    for name, model, samples in (
        ("keras", make(fr, keras, tf, "binary_crossentropy", keras_metrics, squares), data),
        # The effect of weights on a scalar loss depends on the batches.
        ("own loss", make(fr, keras, tf, mean_of_own), data.map(lambda x, y, _: (x, y))),
    ):
        ends = []
        listener = keras.callbacks.LambdaCallback(on_test_end=ends.append)
        by_name = model.evaluate(samples, verbose=0, return_dict=True, callbacks=[listener])
        as_list = model.evaluate(samples, verbose=0)
        assert np.ravel(as_list).tolist() == [by_name[key] for key in model.metrics_names] and ends == [by_name]
        found[name] = by_name
        if name == "keras":
            history = model.fit(samples, validation_data=samples, verbose=0).history
            found["fit"] = {key: values[0] for key, values in history.items()}
    return found, refused(fr, keras, tf, data), own_step(fr, keras, tf, data)


def refused(fr, keras, tf, data):
    """Body: returns the refusal of a metric whose states cannot be added."""

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.largest = self.add_weight("largest", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.largest.assign(tf.maximum(self.largest, tf.reduce_max(y_pred)))

        def result(self):
            return self.largest.read_value()

        def merge_state(self, metrics):
            for metric in metrics:
                self.largest.assign(tf.maximum(self.largest, metric.largest))

    try:
        make(fr, keras, tf, "mse", [Largest()]).evaluate(data, verbose=0)
    except ValueError as error:
        return str(error)


def own_step(fr, keras, tf, data):
    """Body: returns logs of a test_step that belong to no metric of the model."""

    class OwnStep(fr.schedules.PipelinedModel):
        def call(self, inputs):
            return tf.ones_like(inputs["f"])

        def test_step(self, batch):
            step = tf.cast(self._test_counter, tf.float32)
            return {"rank": tf.constant(float(fr.rank())), "step": step}

    model = OwnStep()
    model.compile(steps_per_execution=5)
    return model.evaluate(data, verbose=0, return_dict=True)


@pytest.fixture(scope="module")
def alone():
    return run_ranks(logs_of_all, 1)[0]


@pytest.fixture(scope="module")
def on_three():
    return run_ranks(logs_of_all, 3)


def test_every_rank_tells_the_same(on_three):
    for found, *_ in on_three[1:]:
        assert found == on_three[0][0]


def test_it_is_what_one_process_tells(alone, on_three):
    for name, wanted in alone[0].items():
        got = on_three[0][0][name]
        assert got.keys() == wanted.keys() and not any(np.isnan(value) for value in got.values())
        for key, value in wanted.items():
            # 23 float32 are summed in another order.
            assert got[key] == pytest.approx(value, rel=1e-5), f"{name}: {key}"
    assert {"loss", "mae", "auc", "our_auc", "mse", "val_loss", "val_auc"} <= set(alone[0]["fit"])
    assert 0.1 < alone[0]["keras"]["auc"] != 0.5


def test_unsummable_metrics_are_refused_and_other_logs_are_averaged(alone, on_three):
    assert alone[1] is None  # one process adds nothing
    for _, said, own in on_three:
        assert "metric 'largest' of class Largest has its own merge_state" in said
        assert own == {"rank": 1.0, "step": 4.0}  # the last of the 5 steps of one execution
