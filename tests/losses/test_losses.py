"""Losses equal float64 loops; simulated ranks check the global mean. layers/test_sasrec.py has a reference loss."""

import numpy as np
import pytest

from tf_fusedrec import losses
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.losses import negatives
from tf_fusedrec.losses.objectives import sampled_softmax_of_catalogue


def sampled_softmax_oracle(
    query, positive, rows, positive_ids, row_ids, temperature, chosen=None, l2=True, log_q=None, reused_from=None
):
    """Loops over positions. Reused logits belong to the other position (TurboGR's text)."""

    def unit(vector):
        return vector / max(np.linalg.norm(vector), 1e-6) if l2 else vector

    def corrected(t, vector, log_q):
        return unit(query[t]) @ unit(vector) / temperature - log_q

    def others(t):
        mine = range(len(rows)) if chosen is None else chosen[t]
        logits = [corrected(t, rows[u], log_q[1][u] if log_q else 0) for u in mine]
        ids = [row_ids[u] for u in mine]
        return [-5e4 if name == positive_ids[t] else logit for logit, name in zip(logits, ids)], ids

    nll = []
    for t in range(len(query)):
        logits = [corrected(t, positive[t], log_q[0][t] if log_q else 0), *others(t)[0]]
        for column, k in enumerate([] if reused_from is None else reused_from[t]):
            their_logits, their_ids = others(k)
            column %= len(their_ids)
            out = k == t or their_ids[column] == positive_ids[t]
            logits.append(-5e4 if out else their_logits[column])
        largest = max(logits)
        nll.append(largest + np.log(np.sum(np.exp(np.array(logits) - largest))) - logits[0])
    return np.array(nll)


def retrieval_batch(positions, seed=0):
    generator = np.random.default_rng(seed)
    table = generator.normal(size=(8, 5))
    table[7] = 0.0  # A vector of length 0 cannot be normalised.
    positive_ids, negative_ids = generator.integers(0, 8, positions), generator.permutation(8)[:6]
    query, chosen = generator.normal(size=(positions, 5)), generator.integers(0, 6, (positions, 4))
    return (query, table[positive_ids], table[negative_ids], positive_ids, negative_ids), chosen


@pytest.mark.parametrize("positions", [0, 1, 20])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
def test_sampled_softmax_against_loops(positions, own, normalize, corrected):
    arrays, chosen = retrieval_batch(positions)
    chosen = chosen if own else None
    of_item = np.log(np.random.default_rng(1).dirichlet(np.ones(8)))
    log_q = (of_item[arrays[3]], of_item[arrays[4]]) if corrected else None
    expected = sampled_softmax_oracle(*arrays, 0.3, chosen, normalize, log_q)
    options = {"chosen": chosen, "normalize": normalize, "log_q": log_q}
    ours = losses.sampled_softmax(*map(tf.constant, arrays), 0.3, **options)
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)  # float64 on both sides


def shared_logits(chosen, source):
    """Eq. 2 of TurboGR as written: position i gets other positions' negatives n_k,j, with its own logits."""
    return np.concatenate([chosen, negatives.reuse(chosen, source)], axis=1)


@pytest.mark.parametrize("positions", [0, 1, 2, 20])
def test_both_readings_of_logit_sharing_against_loops(positions):
    arrays, chosen = retrieval_batch(positions)
    source = negatives.other_positions(tf.constant(positions), 2 * 4, tf.constant([1, 2])).numpy()  # k = 3, R = 4
    reused = losses.sampled_softmax(*arrays, 0.3, chosen=chosen, reused_from=source)
    expected = sampled_softmax_oracle(*arrays, 0.3, chosen, reused_from=source)
    np.testing.assert_allclose(reused, expected, rtol=1e-12)
    wide = shared_logits(chosen, source)
    assert wide.shape == (positions, 12)
    written = losses.sampled_softmax(*map(tf.constant, arrays), 0.3, chosen=wide)
    loops = []
    for i in range(positions):  # l_i+ against own n_i,j and Delta, the sum over n_k,j of the others
        aux = [chosen[source[i, j], j % 4] for j in range(8)]
        one = tuple(x[i : i + 1] if x is not arrays[2] and x is not arrays[4] else x for x in arrays)
        loops.append(sampled_softmax_oracle(*one, 0.3, np.array([[*chosen[i], *aux]]))[0])
    np.testing.assert_allclose(written, loops, rtol=1e-12)
    if positions == 20:
        assert np.abs(written - reused).max() > 0.1  # The two readings give different losses.


@pytest.mark.parametrize("positions", [0, 1, 20, 1100])  # 1100: three blocks of rows
def test_softmax_over_a_catalogue_equals_the_one_over_chosen_rows(positions):
    generator = np.random.default_rng(4)
    items, query = generator.normal(size=(8, 5)), generator.normal(size=(positions, 5))
    positives, chosen = generator.integers(0, 8, positions), generator.integers(0, 8, (positions, 6))
    log_q = np.log(generator.dirichlet(np.ones(8)))
    source = negatives.other_positions(tf.constant(positions), 6, tf.constant([1, 2]))

    def of_rows(query, items):
        parts = query, tf.gather(items, positives), items, tf.constant(positives), tf.range(8)
        corrections = log_q[positives], log_q
        return losses.sampled_softmax(*parts, 0.3, chosen=tf.constant(chosen), log_q=corrections, reused_from=source)

    def of_catalogue(query, items):
        parts = query, items, tf.constant(positives), tf.constant(chosen)
        return sampled_softmax_of_catalogue(*parts, 0.3, log_q=log_q, reused_from=source)

    results = []
    for loss in (of_rows, of_catalogue):
        inputs = [tf.constant(query), tf.constant(items)]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            nll = loss(*inputs)
            total = tf.reduce_sum(nll * np.linspace(0.5, 1.5, positions))
        results.append([nll, *map(tf.convert_to_tensor, tape.gradient(total, inputs))])
    for theirs, ours in zip(*results):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-11)  # float64 on both sides


@pytest.mark.parametrize("own", [False, True])
def test_sampled_softmax_gradients_are_numeric_ones(own):
    (query, positive, rows, positive_ids, negative_ids), chosen = retrieval_batch(4)
    positive, rows = positive + 0.5, rows + 0.5  # away from the kink at length 0

    def total(query, positive, rows):
        ids = tf.constant(positive_ids), tf.constant(negative_ids)
        return tf.reduce_sum(losses.sampled_softmax(query, positive, rows, *ids, 0.5, chosen=chosen if own else None))

    inputs = [tf.constant(x) for x in (query, positive, rows)]
    ours, numeric = tf.test.compute_gradient(total, inputs, delta=1e-5)
    for mine, theirs in zip(ours, numeric):
        np.testing.assert_allclose(mine, theirs, atol=1e-7, rtol=0)


@pytest.mark.parametrize("chosen", [None, [[0, 1]]])
def test_a_zero_vector_gets_a_finite_gradient(chosen):
    zero, rows = tf.zeros([1, 3]), tf.constant([[0.0] * 3, [1.0] * 3])
    with tf.GradientTape() as tape:
        tape.watch([zero, rows])
        ids = tf.constant([1]), tf.constant([2, 3])
        nll = losses.sampled_softmax(zero, zero, rows, *ids, 0.05, chosen=chosen and tf.constant(chosen))
    assert all(np.all(np.isfinite(gradient)) for gradient in tape.gradient(nll, [zero, rows]))


def test_bfloat16_is_reduced_in_float32():
    arrays, _ = retrieval_batch(5)
    vectors = [tf.cast(x, tf.bfloat16) for x in arrays[:3]]
    ours = losses.sampled_softmax(*vectors, *map(tf.constant, arrays[3:]), 0.5)
    assert ours.dtype == tf.float32
    expected = sampled_softmax_oracle(*(tf.cast(x, tf.float64).numpy() for x in vectors), *arrays[3:], 0.5)
    np.testing.assert_allclose(ours, expected, atol=1e-5)  # float32 logits up to 2
    many = losses.global_mean(tf.ones([3000], tf.bfloat16), name="many")
    assert many.dtype == tf.float32 and float(many) == 1.0


@pytest.fixture
def ranks(monkeypatch):
    """Runs a body once per simulated rank. all-reduce returns the sum over all simulated ranks."""

    def run(body, batches):
        monkeypatch.setattr(collectives, "size", lambda: len(batches))
        sent = []
        monkeypatch.setattr(collectives, "all_reduce_sum", lambda tensor, **_: sent.append(tensor) or tensor)
        for batch in batches:
            body(batch)
        total = tf.add_n(sent)
        monkeypatch.setattr(collectives, "all_reduce_sum", lambda tensor, **_: total)
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


REFUSALS = [
    (lambda x, ids: losses.sampled_softmax(x, x, x, ids, ids, 0), "temperature must be > 0, got 0"),
    (lambda x, ids: sampled_softmax_of_catalogue(x, x, ids, ids[:, None], 0), "temperature must be > 0, got 0"),
    (lambda x, ids: losses.sampled_softmax(x, x, x[0], ids, ids, 1.0), r"be \[U, D\] and negative_ids \[U\], got "),
    (lambda x, ids: losses.sampled_softmax(x, x, x, ids, ids[:, None], 1.0), r"be \[U, D\] and negative_ids \[U\]"),
    (lambda x, ids: losses.sampled_softmax(x, x, x, ids, ids, 1.0, reused_from=ids[:, None]), "reused_from needs chos"),
    (lambda x, ids: losses.global_mean(x[0], x[:, 0], name="loss"), "weights must have the shape of values"),
]


@pytest.mark.parametrize(("call", "words"), REFUSALS)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call(tf.ones([2, 3]), tf.constant([1, 2]))
