"""The cache of user states against a model of lists, in random orders, with a file too; its errors; concurrency."""

import concurrent.futures

import numpy as np
import pytest

from tests.oracles.user_states import STATE_BYTES, StatesOracle, TooLarge
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

PARTS = ops.StateParts(
    ((tf.float32, 2), (tf.bfloat16, 3), (tf.float32, 0), (tf.int64, 1)), ((tf.float32, 1), (tf.int64, 1))
)
TOKEN_BYTES, USER_BYTES, PAGE_TOKENS = 4 * 2 + 2 * 3 + 8, 4 + 8, 4
PAGE_BYTES = TOKEN_BYTES * PAGE_TOKENS


def int64(numbers):
    return tf.constant(numbers, tf.int64)


class Cache:
    """A cache whose tokens and users are numbers, which all parts repeat. Small integers are exact in all dtypes."""

    def __init__(self, max_bytes, **options):
        options = {"page_tokens": PAGE_TOKENS, "anonymous": True, **options}
        self.handle = ops.user_states(PARTS, max_bytes=max_bytes, **options)

    def find(self, users, version=0, now=0):
        """Returns (revision, tokens, number of the user) of each user, after a check that all parts agree."""
        found = ops.user_states_find(self.handle, int64(users), int64(version), int64(now), parts=PARTS)
        splits = found.row_splits.numpy()
        for (dtype, columns), part in zip(PARTS.of_token, found.of_tokens):
            assert part.dtype == dtype and part.shape == [splits[-1], columns]
        tokens = found.of_tokens[3].numpy()[:, 0]
        of_users = found.of_users[1].numpy()[:, 0]
        for part in found.of_tokens:
            np.testing.assert_array_equal(tf.cast(part, tf.int64), np.repeat(tokens[:, None], part.shape[1], 1))
        np.testing.assert_array_equal(found.of_users[0].numpy()[:, 0], of_users)
        rows = [tokens[begin:end].tolist() for begin, end in zip(splits, splits[1:])]
        return list(zip(found.revisions.numpy().tolist(), rows, of_users.tolist()))

    def write(self, users, revisions, rows, numbers, version=0, now=0):
        tokens = np.array([token for row in rows for token in row], np.int64).reshape(-1, 1)
        of_users = np.array(numbers, np.int64).reshape(-1, 1)
        written = ops.user_states_write(
            self.handle, int64(users), int64(version), int64(now), revisions=int64(revisions),
            row_splits=int64(np.concatenate([[0], np.cumsum([len(row) for row in rows])])),
            of_tokens=[tf.cast(np.repeat(tokens, columns, 1), dtype) for dtype, columns in PARTS.of_token],
            of_users=[tf.cast(np.repeat(of_users, columns, 1), dtype) for dtype, columns in PARTS.of_user],
        )  # fmt: skip
        return written.numpy().tolist()

    def statistics(self):
        return ops.UserStatesStatistics(*ops.user_states_statistics(self.handle).numpy().tolist())


@pytest.mark.parametrize("seed", range(16))
def test_random_orders_agree_with_lists(seed, tmp_path):
    random = np.random.default_rng(seed)
    pages, states, ttl = random.integers(2, 8), random.integers(1, 5), random.choice([0, 60])
    max_bytes = int(pages * PAGE_BYTES + states * (STATE_BYTES + USER_BYTES))
    cache = Cache(max_bytes, ttl=int(ttl))
    tier_bytes = int(random.integers(1, 4) * (PAGE_BYTES + STATE_BYTES + USER_BYTES + random.integers(0, 300)))
    tier_bytes = tier_bytes if seed % 4 else 0
    if tier_bytes:
        assert ops.user_states_spill(cache.handle, str(tmp_path), tier_bytes) == tier_bytes
    oracle = StatesOracle(max_bytes, PAGE_TOKENS, TOKEN_BYTES, USER_BYTES, int(ttl), tier_bytes)
    now = 100
    for step in range(120):
        now += int(random.integers(0, 4))
        # States of the newest version alone go to the file, and become old while they are there.
        version = step // 40 - int(random.integers(0, 9) == 0)
        users = random.integers(-4, 5, random.integers(1, 4)).tolist()
        what = random.integers(0, 20)
        if (what == 0 and step % 40 > 30) or step % 40 == 39:
            assert ops.user_states_drop(cache.handle, version + 1) == oracle.drop(version + 1)
        elif what < 8:
            wanted = [oracle.find((user, version), now) for user in users]
            wanted = [
                (0, [], 0) if state is None else (state.revision, state.tokens, state.of_user) for state in wanted
            ]
            assert cache.find(users, version, now) == wanted
        else:
            rows = [random.integers(0, 100, random.integers(0, 7)).tolist() for _ in users]
            numbers = random.integers(0, 100, len(users)).tolist()
            known = [oracle.states.get((user, version)) for user in users]
            chosen = [
                int(random.choice([state.revision if state else 77, 0, -1], p=[0.7, 0.2, 0.1])) for state in known
            ]
            wanted, too_large = [], False
            for user, revision, row, number in zip(users, chosen, rows, numbers):
                try:
                    wanted.append(revision >= 0 and oracle.write((user, version), revision, row, number, now))
                except TooLarge:
                    too_large = True
            if too_large:
                with pytest.raises(tf.errors.ResourceExhaustedError, match="more than the whole cache: max_bytes"):
                    cache.write(users, chosen, rows, numbers, version, now)
            else:
                assert cache.write(users, chosen, rows, numbers, version, now) == wanted
        got = cache.statistics()
        assert (got.states, got.tokens, got.bytes) == (len(oracle.states), oracle.tokens(), oracle.bytes())
        assert {name: getattr(got, name) for name in oracle.counts} == oracle.counts
        assert (got.tier_states, got.tier_bytes) == (len(oracle.in_file), oracle.bytes_in_file())
        assert got.bytes <= max_bytes and got.tier_bytes <= tier_bytes and got.no_room == got.tier_failures == 0


def test_a_batch_may_name_a_user_twice():
    """Both read the same state. The first append makes the second one late."""
    cache = Cache(10_000)
    assert cache.write([5, 5], [0, 0], [[1], [2]], [10, 20]) == [True, True]
    (revision, tokens, number), again = cache.find([5, 5])
    assert (revision, tokens, number) == again and tokens == [2] and number == 20
    assert cache.write([5, 5], [revision] * 2, [[3], [4, 5]], [30, 40]) == [True, False]
    assert cache.find([5])[0][1:] == ([2, 3], 30)
    assert cache.statistics().outrun == 1


def test_requests_of_one_user_at_the_same_time():
    """Every state that a request sees is a prefix of the user's history, with the number that fits it."""
    cache = Cache(40 * PAGE_BYTES + 3 * (STATE_BYTES + USER_BYTES))
    random = np.random.default_rng(0)
    plans = [[(int(user), int(n)) for user, n in zip(*random.integers(1, 4, (2, 60)))] for _ in range(4)]

    def serve(plan):
        for user, count in plan:
            ((revision, tokens, number),) = cache.find([user])
            assert tokens == [user + 7 * place % 100 for place in range(len(tokens))]
            assert number == len(tokens) % 100
            if len(tokens) > 30:
                revision, tokens = 0, []
            row = [user + 7 * place % 100 for place in range(len(tokens), len(tokens) + count)]
            cache.write([user], [revision], [row], [(len(tokens) + count) % 100])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(serve, plans))
    counts = cache.statistics()
    assert counts.writes + counts.outrun + counts.no_room == 240
    assert counts.hits > 200 and counts.writes > 20


def test_a_cache_without_tokens_and_users():
    cache = Cache(1_000)
    assert cache.find([]) == [] and cache.write([], [], [], []) == []
    assert cache.write([1], [0], [[]], [3]) == [True]
    assert cache.find([1, 2])[0][1:] == ([], 3)
    assert cache.statistics().bytes == STATE_BYTES + USER_BYTES == ops.user_state_bytes(PARTS, 0)
    cache.write([1], [0], [[1, 2, 3, 4, 5]], [3])
    assert cache.statistics().bytes == ops.user_state_bytes(PARTS, 5, PAGE_TOKENS)


def test_shared_and_anonymous_caches():
    first, second = (Cache(1_000, anonymous=False, shared_name="tests/user_states") for _ in range(2))
    first.write([1], [0], [[4]], [3])
    assert second.find([1])[0][1:] == ([4], 3)
    assert Cache(1_000).find([1]) == [(0, [], 0)]
    tf.raw_ops.DestroyResourceOp(resource=first.handle)


def test_errors_name_the_argument():
    cache, refused = Cache(1_000), tf.errors.InvalidArgumentError
    with pytest.raises(refused, match=r"max_bytes must lie in \[356, .*got 355. Remedy: room for one page"):
        Cache(355)
    for options, name in (
        ({"page_tokens": 0}, "page_tokens"),
        ({"page_tokens": 5000}, "page_tokens"),
        ({"ttl": -1}, "ttl"),
    ):
        with pytest.raises(refused, match=f"{name} must lie in"):
            Cache(1_000, **options)
    other = PARTS._replace(of_token=((tf.float32, 3),))
    with pytest.raises(refused, match="of_tokens must have the parts of the cache, float x 2, .*got float x 3"):
        ops.user_states_find(cache.handle, int64([1]), int64(0), int64(0), parts=other)
    right = {
        "revisions": int64([0]), "row_splits": int64([0, 1]),
        "of_tokens": [tf.zeros([1, columns], dtype) for dtype, columns in PARTS.of_token],
        "of_users": [tf.zeros([1, columns], dtype) for dtype, columns in PARTS.of_user],
    }  # fmt: skip
    for wrong, words in (
        ({"revisions": int64([0, 0])}, "must have 1 and 2 entries for 1 users, got 2 and 2"),
        ({"row_splits": int64([0])}, "must have 1 and 2 entries for 1 users, got 1 and 1"),
        ({"row_splits": int64([0, 2])}, r"of_tokens\[0\] must have 2 rows"),
        ({"of_users": right["of_users"][:1]}, "of_users must have the parts of the cache"),
    ):
        with pytest.raises(refused, match=words):
            ops.user_states_write(cache.handle, int64([1]), int64(0), int64(0), **{**right, **wrong})
    assert cache.statistics().writes == 0


def test_refused_files(tmp_path):
    cache, refused = Cache(1_000), tf.errors.InvalidArgumentError
    for folder, size, words in (
        (tmp_path / "none", 1_000, "tier_folder '.*none' must be a folder that can be written, got: No such file"),
        (tmp_path, 355, r"tier_bytes must lie in \[356, .*got 355. Remedy: room for one page"),
    ):
        with pytest.raises(refused, match=words):
            ops.user_states_spill(cache.handle, str(folder), size)
    with pytest.raises(refused, match="tier_folder must have rank 0"):
        ops.user_states_spill(cache.handle, [str(tmp_path)], 1_000)
    ops.user_states_spill(cache.handle, str(tmp_path), 1_000)
    with pytest.raises(tf.errors.FailedPreconditionError, match="the cache has a file already, .*one file for each"):
        ops.user_states_spill(cache.handle, str(tmp_path), 1_000)
    assert not list(tmp_path.iterdir())  # The file has no name.


def test_static_shapes():
    handle, users = (tf.resource, []), (tf.int64, [7])

    def find(states, users, version, now):
        return ops.user_states_find(states, users, version, now, parts=PARTS)

    scalar = (tf.int64, [])
    assert inferred(find, handle, users, scalar, scalar) == [
        [7],
        [8],
        *([None, n] for n in (2, 3, 0, 1)),
        [7, 1],
        [7, 1],
    ]
    with pytest.raises(ValueError, match="must be rank 1"):
        inferred(find, handle, (tf.int64, [7, 1]), scalar, scalar)
