"""losses.py against loops in float64, an independent reference loss, and simulated ranks for the global mean."""

import numpy as np
import pytest

from tests.layers.cases import oracle_file
from tf_fusedrec import collectives, losses
from tf_fusedrec._tf_compat import tf


def sampled_softmax_oracle(query, positive, negatives, positive_ids, negative_ids, temperature, l2):
    def unit(vector):
        return vector / max(np.linalg.norm(vector), 1e-6) if l2 else vector

    nll = []
    for t, own in enumerate(query):
        mine, names = (negatives[t], negative_ids[t]) if negatives.ndim == 3 else (negatives, negative_ids)
        logits = [unit(own) @ unit(positive[t]) / temperature]
        for vector, name in zip(mine, names):
            same = name == positive_ids[t]
            logits.append(-5e4 if same else unit(own) @ unit(vector) / temperature)
        largest = max(logits)
        nll.append(largest + np.log(np.sum(np.exp(np.array(logits) - largest))) - logits[0])
    return np.array(nll)


def retrieval_batch(positions, shared, seed=0):
    generator = np.random.default_rng(seed)
    table = generator.normal(size=(8, 5))
    table[7] = 0.0  # a vector of length 0 cannot be normalised
    positive_ids = generator.integers(0, 8, positions)
    negative_ids = generator.integers(0, 8, (6,) if shared else (positions, 6))
    query = generator.normal(size=(positions, 5))
    return query, table[positive_ids], table[negative_ids], positive_ids, negative_ids


@pytest.mark.parametrize("positions", [0, 1, 20])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_sampled_softmax_against_loops(positions, shared, normalize):
    arrays = retrieval_batch(positions, shared)
    expected = sampled_softmax_oracle(*arrays, 0.3, normalize)
    ours = losses.sampled_softmax(*map(tf.constant, arrays), 0.3, normalize=normalize)
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)  # float64 on both sides


@pytest.mark.parametrize("positions", [0, 1, 20, 1100])  # 1100: three blocks of rows
def test_softmax_over_a_catalogue_equals_the_one_over_gathered_rows(positions):
    generator = np.random.default_rng(4)
    items, query = generator.normal(size=(8, 5)), generator.normal(size=(positions, 5))
    positives, negatives = generator.integers(0, 8, positions), generator.integers(0, 8, (positions, 6))

    def gathered(query, items):
        parts = query, tf.gather(items, positives), tf.gather(items, negatives), tf.constant(positives)
        return losses.sampled_softmax(*parts, tf.constant(negatives), 0.3)

    def chosen(query, items):
        return losses.sampled_softmax_of_catalogue(query, items, tf.constant(positives), tf.constant(negatives), 0.3)

    results = []
    for loss in (gathered, chosen):
        inputs = [tf.constant(query), tf.constant(items)]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            nll = loss(*inputs)
            total = tf.reduce_sum(nll * np.linspace(0.5, 1.5, positions))
        results.append([nll, *map(tf.convert_to_tensor, tape.gradient(total, inputs))])
    for theirs, ours in zip(*results):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-11)  # float64 on both sides
    with pytest.raises(ValueError, match="temperature must be > 0, got 0"):
        losses.sampled_softmax_of_catalogue(query, items, positives, negatives, 0)


@pytest.mark.parametrize("shared", [False, True])
def test_sampled_softmax_gradients_are_numeric_ones(shared):
    query, positive, negatives, positive_ids, negative_ids = retrieval_batch(4, shared)
    positive, negatives = positive + 0.5, negatives + 0.5  # away from the kink at length 0

    def total(query, positive, negatives):
        return tf.reduce_sum(
            losses.sampled_softmax(query, positive, negatives, positive_ids, tf.constant(negative_ids), 0.5)
        )

    inputs = [tf.constant(x) for x in (query, positive, negatives)]
    ours, numeric = tf.test.compute_gradient(total, inputs, delta=1e-5)
    for mine, theirs in zip(ours, numeric):
        np.testing.assert_allclose(mine, theirs, atol=1e-7, rtol=0)


def test_a_zero_vector_gets_a_finite_gradient():
    zero = tf.zeros([1, 3])
    with tf.GradientTape() as tape:
        tape.watch(zero)
        nll = losses.sampled_softmax(zero, zero, tf.ones([2, 3]), [1], tf.constant([2, 3]), 0.05)
    assert np.all(np.isfinite(tape.gradient(nll, zero)))


def test_sampled_softmax_equals_the_reference_model():
    arrays, settings = oracle_file("model_tiny_sasrec")
    items = arrays["p___embedding_module___item_emb__weight"]
    lengths, ids = arrays["lengths"], arrays["ids"]
    query = np.concatenate([row[:n] for row, n in zip(arrays["seq_embeddings"], lengths)])
    positive_ids = np.concatenate([row[1 : n + 1] for row, n in zip(ids, lengths)])
    nll = losses.sampled_softmax(
        query,
        tf.constant(items[positive_ids]),
        tf.constant(items[arrays["negatives"]]),
        positive_ids,
        tf.constant(arrays["negatives"]),
        settings["temperature"],
    )
    loss = losses.global_mean(nll, tf.ones_like(nll), name="reference")
    # Twice the file's own float32 noise, and one rounding of the 26 queries it keeps as float32 (logits up to 20).
    np.testing.assert_allclose(loss, arrays["loss"], atol=2 * arrays["noise_loss"] + 20 * 2**-23)


def test_bfloat16_is_reduced_in_float32():
    arrays = retrieval_batch(5, shared=True)
    vectors = [tf.cast(x, tf.bfloat16) for x in arrays[:3]]
    ours = losses.sampled_softmax(*vectors, *map(tf.constant, arrays[3:]), 0.5)
    assert ours.dtype == tf.float32
    expected = sampled_softmax_oracle(*(tf.cast(x, tf.float64).numpy() for x in vectors), *arrays[3:], 0.5, True)
    np.testing.assert_allclose(ours, expected, atol=1e-5)  # float32 logits up to 2
    many = losses.global_mean(tf.ones([3000], tf.bfloat16), name="many")
    assert many.dtype == tf.float32 and float(many) == 1.0


@pytest.fixture
def ranks(monkeypatch):
    """Runs a body once per simulated rank; all-reduce answers the sum that all of them would send."""

    def run(body, batches):
        monkeypatch.setattr(collectives, "size", lambda: len(batches))
        sent = []
        monkeypatch.setattr(collectives, "all_reduce_sum", lambda tensor, *, name: sent.append(tensor) or tensor)
        for batch in batches:
            body(batch)
        total = tf.add_n(sent)
        monkeypatch.setattr(collectives, "all_reduce_sum", lambda tensor, *, name: total)
        return [body(batch) for batch in batches]

    return run


def test_global_mean_averages_to_the_mean_of_all_values(ranks):
    batches = [([1.0, 2.0, 3.0], [1.0, 0.0, 2.0]), ([7.0], [0.5]), ([], [])]

    def body(batch):
        values, weights = (tf.constant(x, tf.float32) for x in batch)
        with tf.GradientTape() as tape:
            tape.watch([values, weights])
            loss = losses.global_mean(values, weights, name="loss")
        return loss, *tape.gradient(loss, [values, weights])

    answers = ranks(body, batches)
    assert np.mean([loss for loss, _, _ in answers]) == pytest.approx((1 + 6 + 3.5) / 3.5)
    # The gradient of the global mean is weight / 3.5; averaging over 3 ranks divides by 3.
    for (_, weights), (_, gradient, to_weights) in zip(batches, answers):
        np.testing.assert_allclose(gradient, 3.0 * np.array(weights) / 3.5, rtol=1e-6)
        assert to_weights is None


def test_global_mean_of_nothing_is_zero(ranks):
    empty = ranks(lambda x: losses.global_mean(tf.constant(x), name="loss"), [[0.0][:0], [0.0][:0]])
    assert [float(x) for x in empty] == [0.0, 0.0]
    with tf.GradientTape() as tape:
        values = tf.Variable([1.0, 2.0])
        loss = losses.global_mean(values, [0.0, 0.0], name="loss")
    assert float(loss) == 0.0
    np.testing.assert_array_equal(tape.gradient(loss, values), [0.0, 0.0])


def test_weighted_binary_cross_entropy():
    labels, logits, weights = np.array([1, 0, 1, 0]), np.array([2.0, -1.0, -300.0, 5.0]), [1, 2, 3, 0]
    chance = 1.0 / (1.0 + np.exp(-logits[:2]))
    values = np.array([-np.log(chance[0]), -np.log(1 - chance[1]), 300.0, 0.0])
    ours = losses.weighted_binary_cross_entropy(labels, logits, weights, name="click")
    np.testing.assert_allclose(ours, np.average(values, weights=weights), rtol=1e-12)
    plain = losses.weighted_binary_cross_entropy(labels[:2], logits[:2], name="click")
    np.testing.assert_allclose(plain, values[:2].mean(), rtol=1e-12)


def test_what_cannot_be_done_is_named():
    x, ids = tf.ones([2, 3]), tf.constant([1, 2])
    with pytest.raises(ValueError, match="temperature must be > 0, got 0"):
        losses.sampled_softmax(x, x, x, ids, ids, 0)
    with pytest.raises(ValueError, match=r"negatives must be \[T, n, D\] or \[n, D\], got shape"):
        losses.sampled_softmax(x, x, x[0], ids, ids, 1.0)
    with pytest.raises(ValueError, match="negative_ids must name every row of negatives"):
        losses.sampled_softmax(x, x, x, ids, ids[:, tf.newaxis], 1.0)
    with pytest.raises(ValueError, match="weights must have the shape of values"):
        losses.global_mean(tf.ones([2]), tf.ones([3]), name="loss")
    with pytest.raises(ValueError, match="labels must have the shape of logits"):
        losses.weighted_binary_cross_entropy(tf.ones([2]), tf.ones([2, 1]), name="loss")
