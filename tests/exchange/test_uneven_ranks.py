"""Uneven batches on 1, 2, 3 and 4 real ranks: `model.fit` gives the dense weights and rows of one process. This covers
MTGRBoost 5.1: losses weighted by the global number of samples, dense gradients averaged by Horovod, and row gradients
averaged by FusedEmbedding.
"""

import numpy as np
import pytest

from tests.support.ranks import run_ranks

SAMPLES, STEPS = 12, 4


def fit_uneven(rank_without_data):
    """Body: fits a small click model on this rank's slice of every step's samples."""
    import tf_fusedrec as fr
    from tf_fusedrec import keras, losses, tf

    rank, size = fr.rank(), fr.size()
    legacy = keras.optimizers.legacy
    shares = np.arange(1, size + 1)
    if rank_without_data and size > 1:
        shares[0] = 0
    bounds = np.round(np.concatenate([[0], np.cumsum(shares)]) / shares.sum() * SAMPLES).astype(int)
    mine = slice(bounds[rank], bounds[rank + 1])

    class Clicks(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = fr.FusedEmbedding(
                tables=[fr.TableConfig(name="t", dim=4, optimizer=legacy.Adagrad(0.5))],
                features=[fr.FeatureConfig(name="f", table="t", combiner="sum")],
            )
            self.head = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, inputs):
            return self.head(self.embedding({"f": inputs["ids"]})["f"])[:, 0]

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return losses.weighted_binary_cross_entropy(x["label"], y_pred, x["weight"], name="loss")

    random = np.random.default_rng(1)
    data = {
        "ids": random.integers(0, 9, (STEPS, SAMPLES, 3)),
        "label": random.integers(0, 2, (STEPS, SAMPLES)).astype(np.float32),
        "weight": random.integers(1, 4, (STEPS, SAMPLES)).astype(np.float32),
    }
    model = Clicks()
    model.compile(fr.collectives.distributed_optimizer(legacy.SGD(0.5)))
    model.fit(tf.data.Dataset.from_tensor_slices({k: v[:, mine] for k, v in data.items()}), verbose=0)
    return [w.numpy() for w in model.head.weights], model.embedding.export_table("t")


@pytest.mark.parametrize("rank_without_data", [False, True])
def test_weights_after_fit_do_not_depend_on_the_number_of_ranks(rank_without_data):
    (want_dense, (want_ids, want_rows)) = run_ranks(fit_uneven, 1, rank_without_data=rank_without_data)[0]
    for size in (2, 3, 4):
        results = run_ranks(fit_uneven, size, rank_without_data=rank_without_data)
        for dense, _ in results:
            for got, want in zip(dense, want_dense):
                # Four steps sum 12 float32 samples in another order.
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        ids = np.concatenate([table[0] for _, table in results])
        rows = np.concatenate([table[1] for _, table in results])
        np.testing.assert_array_equal(np.sort(ids), want_ids)
        np.testing.assert_allclose(rows[np.argsort(ids)], want_rows, rtol=1e-5, atol=1e-6)


def gradients_of_shares(shares, weights=(1.0,) * 10):
    """Body: returns dense gradients of 10 samples, of which this rank has shares[rank], by a step of SGD(1).

    The losses are a global mean, and compile's loss with weights of the samples.
    """
    import tf_fusedrec as fr
    from tf_fusedrec import keras, losses, tf

    class GlobalMean(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return losses.weighted_binary_cross_entropy(y[:, 0], y_pred[:, 0], name="loss")

    rank, random = fr.rank(), np.random.default_rng(3)
    begin = sum(shares[:rank])
    mine = slice(begin, begin + shares[rank])
    x, label = random.normal(size=[10, 4]).astype(np.float32), (random.random([10, 1]) < 0.5).astype(np.float32)
    values, weights = 0.1 * random.normal(size=100), np.array(weights, np.float32)
    found = []
    for kind, loss in ((GlobalMean, None), (keras.Sequential, keras.losses.BinaryCrossentropy(from_logits=True))):
        model = kind([keras.layers.Dense(3, "tanh"), keras.layers.Dense(1, use_bias=False)])
        model(tf.zeros([0, 4]))
        model.set_weights([np.reshape(values[: w.size], w.shape) for w in model.get_weights()])
        before = model.get_weights()
        model.compile(fr.collectives.distributed_optimizer(keras.optimizers.legacy.SGD(1.0)), loss)
        model.fit(tf.data.Dataset.from_tensors((x[mine], label[mine], weights[mine])), verbose=0)
        found.append([b - a for a, b in zip(model.get_weights(), before)])
    return found


def test_ranks_with_3_and_7_samples_have_the_gradient_of_one_process_with_10():
    """The gradient of a global mean is equal. compile's loss weighs ranks: a sample of 3 counts 7/3 of one of 7."""
    by_rank = [10 / (2 * 3)] * 3 + [10 / (2 * 7)] * 7
    want = run_ranks(gradients_of_shares, 1, shares=[10], weights=by_rank)[0]
    for wanted in want:
        assert min(np.abs(of).max() for of in wanted) > 1e-3
    assert max(np.abs(of - other).max() for of, other in zip(*want)) > 1e-3
    for got in run_ranks(gradients_of_shares, 2, shares=[3, 7]):
        for ours, theirs in zip(sum(got, []), sum(want, [])):
            # float32 sums of 10 samples run in another order; the gradient is a difference of weights near 0.1.
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
