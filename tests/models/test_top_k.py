"""Searches of the best items against NumPy: all items in blocks, and the lists of an index."""

import numpy as np
import pytest

from tf_fusedrec import tf
from tf_fusedrec.models import top_k
from tf_fusedrec.models.item_index import IndexOptions, ItemIndex

RANDOM = np.random.default_rng(0)


def unit(vectors):
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def clustered(count, centers):
    """Vectors near one of the centers."""
    return unit(centers[RANDOM.integers(0, len(centers), count)] + RANDOM.normal(0, 0.03, [count, centers.shape[1]]))


CENTERS = unit(RANDOM.normal(size=[40, 16]))
ITEMS, USERS = clustered(4000, CENTERS), clustered(5, CENTERS)
SEEN = [[3, 3999], [], [7], list(range(0, 4000, 2)), []]


def embed(positions):
    return tf.gather(tf.constant(ITEMS), positions)


def expected(k, allowed=None):
    scores = USERS @ ITEMS.T
    for row, seen in enumerate(SEEN):
        scores[row, seen] = -4
        if allowed is not None:
            scores[row, ~np.isin(np.arange(len(ITEMS)), allowed[row])] = -5
    return np.argsort(-scores, axis=1, kind="stable")[:, :k], -np.sort(-scores, axis=1)[:, :k]


@pytest.mark.parametrize("block", [64, 4000, 8192])
def test_all_items_in_blocks(monkeypatch, block):
    monkeypatch.setattr(top_k, "BLOCK", block)
    positions, scores = top_k.best_of_all(
        tf.constant(USERS), tf.ragged.constant(SEEN, dtype=tf.int64), tf.constant(100), len(ITEMS), embed
    )
    want, of_want = expected(100)
    np.testing.assert_allclose(scores, of_want, atol=1e-6)  # float32, other order of summation
    assert np.mean(positions == want) > 0.99  # Only near ties change places.
    with pytest.raises(tf.errors.InvalidArgumentError, match="input k is 4001, want 0 to 4000, the items"):
        top_k.best_of_all(
            tf.constant(USERS), tf.ragged.constant(SEEN, dtype=tf.int64), tf.constant(4001), len(ITEMS), embed
        )


@pytest.fixture(scope="module")
def index():
    index = ItemIndex(len(ITEMS), 16, IndexOptions(share=0.1))
    index.build(ITEMS)
    return index


def test_every_item_is_in_the_list_of_its_nearest_centroid(index):
    centroids, order, splits = (variable.numpy() for variable in index.variables)
    assert index.lists == 63 and index.products == 400
    np.testing.assert_array_equal(np.sort(order), np.arange(len(ITEMS)))
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-6)
    of_item = np.repeat(np.arange(index.lists), np.diff(splits))
    np.testing.assert_array_equal((ITEMS[order] @ centroids.T).argmax(axis=1), of_item)
    again = ItemIndex(len(ITEMS), 16, IndexOptions(share=0.1))
    again.build(ITEMS)
    np.testing.assert_array_equal(again.order, order)


def test_the_lists_nearest_to_a_user_are_searched(index):
    centroids, order, splits = (variable.numpy() for variable in index.variables)
    lists = np.split(order, splits[1:-1])
    allowed = []
    for user in USERS:
        ranked = np.argsort(-(centroids @ user))
        count = np.searchsorted(np.cumsum([len(lists[at]) for at in ranked]), index.products - index.lists, "right")
        allowed.append(np.concatenate([lists[at] for at in ranked[: max(1, count)]]))
    assert max(map(len, allowed)) <= index.products - index.lists
    positions, scores = top_k.best_of_lists(
        tf.constant(USERS), tf.ragged.constant(SEEN, dtype=tf.int64), tf.constant(400), index, embed
    )
    want, of_want = expected(400, allowed)
    real = of_want > -3
    assert real.any() and not real.all()
    np.testing.assert_allclose(scores.numpy()[real], of_want[real], atol=1e-6)
    assert np.mean(positions.numpy()[real] == want[real]) > 0.99
    for row, seen in enumerate(SEEN):  # Behind the items of the lists come seen ones and -1.
        rest = positions.numpy()[row][~real[row]]
        assert set(rest.tolist()) <= {-1, *seen}
        assert (scores.numpy()[row][~real[row]] == scores.dtype.min).all()
    best, _ = top_k.best_of_all(
        tf.constant(USERS), tf.ragged.constant(SEEN, dtype=tf.int64), tf.constant(20), len(ITEMS), embed
    )
    found = [len(set(a) & set(b)) for a, b in zip(positions[:, :20].numpy().tolist(), best.numpy().tolist())]
    assert np.mean(found) / 20 > 0.95


def test_seen_items_that_the_catalogue_lacks_have_no_position():
    catalogue = tf.constant([2, 5, 9], tf.int64)
    seen = top_k.seen_positions(catalogue, tf.constant([9, 1, 2, 10, 5], tf.int64), tf.constant([0, 3, 3, 5], tf.int64))
    assert seen.to_list() == [[2, 0], [], [1]]


@pytest.mark.parametrize(("share", "lists"), [(0.0, 0), (1.5, 0), (0.1, 10), (0.5, -1)])
def test_options_out_of_range(share, lists):
    with pytest.raises(ValueError, match="an index of 100 items .*Raise share, or lower lists"):
        ItemIndex(100, 4, IndexOptions(share, lists))
