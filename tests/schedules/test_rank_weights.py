"""The loss of compile on three ranks of very different batches trains as on one process (MTGRBoost, section 5.1)."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.schedules import clicks
from tests.support.ranks import run_ranks
from tf_fusedrec import keras
from tf_fusedrec.schedules import PipelinedModel

SAMPLES = 12
# Samples of each rank in every step. Each rank has an empty batch once, and one step is one rank's alone.
SHARES = ((7, 0, 5), (0, 11, 1), (1, 3, 8), (0, 12, 0), (4, 8, 0))
# Nested has the look-ahead of DualBuffer and the micro-batches of FrozenWindow.
KINDS = ("sync", "semi_async", "nested", "global_mean", "equal_ranks")


def fit(kinds):
    """Body: by kind of model, dense weights and this rank's rows after a step on each row of SHARES, and the loss."""
    from tf_fusedrec import collectives, losses, schedules, tf

    rank, size, found = fr.rank(), fr.size(), {}

    class GlobalMean(keras.Model):
        """Ends a loss of its own with losses.global_mean."""

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            values = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(y > 0, tf.float32), y_pred[:, 0])
            return losses.global_mean(values, sample_weight, name="loss")

    layouts = {"semi_async": schedules.SemiAsync(), "nested": schedules.Nested(2)}

    def batches():
        for step, shares in enumerate(SHARES):
            begin = sum(shares[:rank]) if size > 1 else 0
            end = begin + shares[rank] if size > 1 else SAMPLES
            yield tf.nest.map_structure(lambda t, b=begin, e=end: t[b:e], clicks.batch(SAMPLES, step))

    for kind in kinds:
        embedding = clicks.make_embedding("Adagrad", name=f"embedding_{kind}")
        optimizer = collectives.distributed_optimizer(keras.optimizers.Adagrad(0.1))
        model = clicks.make_model(
            embedding, layouts.get(kind, "sync"), optimizer, regularizer=keras.regularizers.L2(0.01)
        )
        if kind == "global_mean":
            model = GlobalMean(model.input, model.output)
            model.compile(optimizer)
        if kind == "equal_ranks":
            model.loss_weights = lambda pieces: tf.ones([len(pieces)])
        data = tf.data.Dataset.from_generator(batches, output_signature=clicks.SIGNATURE)
        history = model.fit(data, steps_per_epoch=len(SHARES), verbose=0).history
        rows = {name: embedding.export_table(name) for name in ("item", "user")}
        found[kind] = [w.numpy() for w in model.trainable_weights if w.shape.rank], rows, history.get("loss")
    return found


@pytest.fixture(scope="module")
def trained():
    """The results of one process, and of three ranks with the shares."""
    (alone,) = run_ranks(fit, 1, kinds=KINDS[:-1])
    return {**alone, "equal_ranks": alone["sync"]}, run_ranks(fit, 3, kinds=KINDS)


def differences(trained, kind):
    """The largest difference of three ranks from one process, of dense weights and of rows."""
    (wanted, wanted_rows, _), of_ranks = trained[0][kind], [one[kind] for one in trained[1]]
    dense = max(np.abs(a - b).max() for weights, _, _ in of_ranks for a, b in zip(weights, wanted))
    rows = 0.0
    for name, (ids, values) in wanted_rows.items():
        all_ids, all_rows = clicks.joined([of_rank[name] for _, of_rank, _ in of_ranks])
        np.testing.assert_array_equal(all_ids, ids)
        rows = max(rows, np.abs(all_rows - values).max())
    return dense, rows


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "equal_ranks"])
def test_three_ranks_of_uneven_batches_equal_one_process(trained, kind):
    # Five steps of Adagrad on float32 sums of 12 samples in another order; weights and rows are of the order of 1.
    assert max(differences(trained, kind)) < 2e-5


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("equal_ranks", "global_mean")])
def test_the_logged_loss_is_that_of_one_process(trained, kind):
    """Keras logs of a model of its own are each rank's. The factor of a rank is no part of them."""
    for of_rank in trained[1]:
        np.testing.assert_allclose(of_rank[kind][2], trained[0][kind][2], rtol=1e-5)


def test_a_model_may_weigh_ranks_equally(trained):
    """The difference that weights by samples make: without it, the test above could not fail."""
    assert min(differences(trained, "equal_ranks")) > 1e-3


def _sums(losses):
    model = clicks.make_model(clicks.make_embedding())
    outputs = {f"y{i}": keras.layers.Dense(1, name=f"y{i}")(model.output) for i in range(len(losses))}
    return model, outputs, {f"y{i}": loss for i, loss in enumerate(losses)}


def test_a_loss_that_divides_by_sample_weights_is_that_of_the_whole_batch():
    """The halves of a batch of nested(2) have other sums of sample weights."""
    x, y, weights = np.arange(8), np.arange(8, dtype=np.float32), np.array([9.0, 9, 9, 9, 1, 1, 1, 1], np.float32)
    rows = []
    for schedule in ("sync", "nested(2)"):
        ids = keras.Input([], dtype="int64", name="ids")
        layer = fr.Embedding(2, fr.optimizers.SGD(0.1), initializer="ones", name=f"weighed_{schedule[:4]}")
        model = PipelinedModel(ids, keras.layers.Dense(1, kernel_initializer="ones")(layer(ids)), schedule=schedule)
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.1), loss)
        model.fit(x, y, sample_weight=weights, batch_size=8, verbose=0)
        rows.append(layer.export_table(layer.name)[1])
    np.testing.assert_allclose(*rows, rtol=1e-6)
    with pytest.raises(ValueError, match="has the reduction 'mean_with_sample_weight' beside other losses.*Use"):
        model.compile("sgd", [loss, loss])
        model.loss_weights([(x, y, weights)])


@pytest.mark.parametrize("reduction", ["sum", None])
def test_means_and_sums_in_one_model_are_refused_on_several_ranks(reduction, monkeypatch):
    mean, total = (keras.losses.MeanSquaredError(reduction=how) for how in ("sum_over_batch_size", reduction))
    for losses in ([mean, mean], [total, total]):
        model, outputs, named = _sums(losses)
        PipelinedModel(model.inputs, outputs).compile("sgd", named)
    model, outputs, named = _sums([mean, total])
    PipelinedModel(model.inputs, outputs).compile("sgd", named)  # one process has nothing to weigh
    monkeypatch.setattr("tf_fusedrec.exchange.collectives.size", lambda: 2)
    with pytest.raises(ValueError, match=r"are sums over samples, \['mean_squared_error'\], and means, .*Use"):
        PipelinedModel(model.inputs, outputs).compile("sgd", named)
