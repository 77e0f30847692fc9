"""Rows that pieces share: the ops of several ranks over a network of lists, with a table of numbers."""

import numpy as np
import pytest

from tests.support.ids import INT64_MAX, INT64_MIN
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

CASES = {
    "example": [[[7, 5]], [[5, 9]]],
    "tables": [[[1, 2], [2]], [[2, 3], []], [[1], [2, 1]]],
    "empty pieces": [[[], []], [[4], [4]], [[], []], [[4], []], [[], []]],
    "nothing": [[[]], [[]]],
    "extreme": [[[INT64_MIN, 0]], [[-1, INT64_MAX, INT64_MIN]], [[INT64_MAX]]],
    "one piece": [[[3, 1], [2]]],
    "all the same": [[[6, 8]]] * 9,
}


def random_pieces(seed):
    random = np.random.default_rng(seed)
    pieces, segments, most = random.integers(1, 9), random.integers(1, 4), random.integers(1, 40)
    draw = lambda: random.permutation(40)[: random.integers(0, most)].tolist()  # noqa: E731
    return [[draw() for _ in range(segments)] for _ in range(pieces)]


ALL = {**CASES, **{f"seed {seed}": random_pieces(seed) for seed in range(20)}}


def unique_ids(piece):
    splits = np.cumsum([0, *map(len, piece)])
    return ops.UniqueIds(tf.constant(sum(piece, []), tf.int64), tf.constant(splits, tf.int64), None)


class Rank:
    """One rank that asks for the ids of its pieces."""

    def __init__(self, pieces, ranks):
        self.pieces, self.segments = pieces, len(pieces[0])
        self.ids = ops.window_unique([unique_ids(piece) for piece in pieces])
        self.ranked = [ops.rank_partition(*new, num_ranks=ranks) for new in self.ids.new]
        self.route = ops.window_route(self.ids, self.ranked, num_segments=self.segments)

    def parts(self):
        """The messages of the pieces and the marks, as one list of blocks each."""
        sent = [*((one.message, one.send_splits) for one in self.ranked), (self.route.marks, self.route.marks_splits)]
        return [np.split(m.numpy()[: sum(s.numpy())], np.cumsum(s.numpy())[:-1]) for m, s in sent]


def received(parts_of_ranks, owner):
    """Messages and splits that an owner gets, and last the marks."""
    for of_part in zip(*parts_of_ranks):
        blocks = [of_rank[owner] for of_rank in of_part]
        yield tf.constant(np.concatenate(blocks), tf.int64), tf.constant([len(block) for block in blocks], tf.int32)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", ALL)
def test_rows_and_gradients_find_their_ids_over_a_network(case, ranks):
    """Every rank reads the right rows in every piece. Each owner gets each row's sum once, with its last piece."""
    of_ranks = [ALL[case], *(random_pieces(100 * len(case) + rank) for rank in range(1, ranks))]
    pieces, segments = min(map(len, of_ranks)), min(len(one[0]) for one in of_ranks)
    of_ranks = [[piece[:segments] for piece in one[:pieces]] for one in of_ranks]
    row_of = lambda s, one: [s, one, 100.0 * s + one]  # noqa: E731
    asking = [Rank(one, ranks) for one in of_ranks]
    parts = [rank.parts() for rank in asking]
    arrived = [[[] for _ in range(pieces)] for _ in range(ranks)]  # rows by asking rank and piece, owners in order
    trained = []
    for owner in range(ranks):
        *messages, marks = received(parts, owner)
        come = ops.window_gradients(*zip(*messages), *marks, num_segments=segments)
        ids = []
        for i, (message, splits) in enumerate(messages):
            for rank, block in enumerate(np.split(message.numpy(), np.cumsum(splits.numpy())[:-1])):
                of_segment = np.repeat(np.arange(segments), block[:segments])
                keys = list(zip(of_segment.tolist(), block[segments:].tolist()))
                arrived[rank][i] += [row_of(*key) for key in keys]
                ids += [(rank, *key) for key in keys]
        trained.append(([[ids[v] for v in rows.numpy()] for rows in come.rows], come.trained))
    for me, (rank, mine) in enumerate(zip(asking, of_ranks)):
        gradients = []
        for i, piece in enumerate(mine):
            keys = [(s, one) for s, ids in enumerate(piece) for one in ids]
            rows = [tf.constant(part, tf.float32, [len(part), 3]) for part in arrived[me][: i + 1]]
            splits, ones = tf.range(len(keys) + 1, dtype=tf.int64), tf.ones([len(keys)])
            got = ops.pooled_recover_parts(rows, rank.route.rows[i], splits, ones)
            np.testing.assert_array_equal(got, np.reshape([row_of(*key) for key in keys], [-1, 3]))
            gradients.append(tf.constant([[s, one, 1.0] for s, one in keys], tf.float32, [len(keys), 3]))
            splits = rank.route.term_splits[i]
            ones = tf.ones([len(splits) - 1])
            sums = ops.pooled_recover_parts(gradients, rank.route.term_index[i], splits, ones)
            blocks = np.split(sums.numpy(), np.cumsum(rank.route.gradient_splits[i])[:-1])
            for owner, block in enumerate(blocks):
                due = [key[1:] for key in trained[owner][0][i] if key[0] == me]
                np.testing.assert_array_equal(
                    block[:, :2], np.reshape([row_of(*key)[:2] for key in due], [-1, 2]) * block[:, 2:]
                )
                assert all(max(j for j, held in enumerate(mine) if one in held[s]) == i for s, one in due)
                uses = [sum(one in piece[s] for piece in mine) for s, one in due]
                assert block[:, 2].tolist() == uses
                message, splits = trained[owner][1][i]
                begin = sum(splits.numpy()[:me])
                counts = [sum(s == of for s, _ in due) for of in range(segments)]
                assert message.numpy()[begin : begin + splits[me]].tolist() == [*counts, *[one for _, one in due]]


def unique(ids, splits):
    ids, splits = [tf.constant(one, tf.int64) for one in ids], [tf.constant(one, tf.int64) for one in splits]
    return ops.window_unique([ops.UniqueIds(one, bounds, None) for one, bounds in zip(ids, splits)])


@pytest.mark.parametrize(
    ("ids", "splits", "words"),
    [
        ([[1, 2], [3]], [[0, 2], [0, 2]], r"id_splits\[1\] must run from 0 to 1, got first 0, last 2"),
        ([[1, 2], [3]], [[0, 2], [0, 1, 1]], r"id_splits\[1\] must bound one segment or more, as many .* got 2 and 1"),
        ([[], []], [[0], [0]], r"id_splits\[0\] must bound one segment or more"),
        ([[1], [[3]]], [[0, 1], [0, 1]], r"ids\[1\] must have rank 1"),
        ([[1], [3]], [[0, 1], 1], r"id_splits\[1\] must have rank 1"),
    ],
)
def test_wrong_pieces_are_refused(ids, splits, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        unique(ids, splits)


def route(**changed):
    """window_route of the pieces 7 5 | 5 9 at one owner, with some arguments changed."""
    rank = Rank([[[7, 5]], [[5, 9]]], 1)
    ids = rank.ids._replace(**{name: changed.pop(name) for name in ("numbers", "last") if name in changed})
    ranked = [one._replace(**{name: value[i] for name, value in changed.items()}) for i, one in enumerate(rank.ranked)]
    int32 = lambda values: tf.constant(values, tf.int32)  # noqa: E731
    ids = ids._replace(numbers=[int32(one) for one in ids.numbers], last=int32(ids.last))
    ranked = [one._replace(send_splits=int32(one.send_splits), restore=int32(one.restore)) for one in ranked]
    return ops.window_route(ids, ranked, num_segments=1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"last": [0, 1]}, "last must have one entry for each of the 3 ids of messages, got 2"),
        ({"last": [0, 1, 0]}, r"last\[2\] must lie in \[1, 2\), got 0"),
        ({"last": [0, 2, 1]}, r"last\[1\] must lie in \[0, 2\), got 2"),
        ({"last": [[0, 1, 1]]}, "last must have rank 1"),
        ({"numbers": [[0, 1], [1, 3]]}, r"numbers\[1\]\[1\] must name an id that piece 1 holds, in \[0, 3\), got 3"),
        ({"numbers": [[0, 2], [1, 2]]}, r"numbers\[0\]\[1\] must name an id that piece 0 holds, .* got 2"),
        ({"numbers": [[0, -1], [1, 2]]}, r"numbers\[0\]\[1\] must name an id"),
        ({"numbers": [[0, 1], [0, 2]]}, r"numbers\[1\]\[0\] must name an id that piece 1 holds, .* got 0"),
        ({"restore": [[0, 0], [0]]}, r"restore\[0\] must hold each row in \[0, 2\) once, got 0 at entry 1"),
        ({"restore": [[0, 1], [1]]}, r"restore\[1\] must hold each row in \[0, 1\) once, got 1 at entry 0"),
        ({"restore": [[0, 1], []]}, r"restore\[1\] must have one entry for each of the 1 ids of messages\[1\], got 0"),
        ({"send_splits": [[3], [0]]}, r"splits\[1\]\[0\] must be at least the 1 counts of a header, got 0"),
        ({"send_splits": [[3], [3]]}, r"messages\[1\]: message of rank 0 counts 1 ids but holds 2"),
        ({"send_splits": [[3], [2, 0]]}, r"splits\[1\] must have one entry per rank, 1 like splits\[0\], got 2"),
        ({"send_splits": [[[3]], [[2]]]}, r"splits\[0\] must have rank 1"),
    ],
)
def test_arguments_of_other_ids_are_refused(changed, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        route(**changed)


@pytest.mark.parametrize(
    ("marks", "splits", "words"),
    [
        ([1, 0b110], [1], r"marks must have 2 entries for the 3 ids of rank 0, got 1 of 2 left"),
        ([1], [2], r"marks must have 2 entries for the 3 ids of rank 0, got 2 of 1 left"),
        ([1, 0b110], [1, 1], "marks_splits must have one entry for each of the 1 ranks of messages, got 2"),
        ([1, 0b010], [2], r"marks of rank 0 give the last piece 0 to an id of piece 1, outside \[1, 2\)"),
        ([[1, 0b110]], [2], "marks must have rank 1"),
        ([1, 0b110], 2, "marks_splits must have rank 1"),
    ],
)
def test_marks_that_lie_are_refused(marks, splits, words):
    messages = [tf.constant(one, tf.int64) for one in ([2, 7, 5], [1, 9])]
    bounds = [tf.constant(one, tf.int32) for one in ([3], [2])]
    right = tf.constant([1, 0b110], tf.int64), tf.constant([2], tf.int32)
    assert [rows.numpy().tolist() for rows in ops.window_gradients(messages, bounds, *right, num_segments=1).rows] == [
        [0], [1, 2]
    ]  # fmt: skip
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        ops.window_gradients(
            messages, bounds, tf.constant(marks, tf.int64), tf.constant(splits, tf.int32), num_segments=1
        )


def test_a_last_piece_that_does_not_exist_is_refused():
    messages, bounds = [tf.constant([1, 7], tf.int64)] * 3, [tf.constant([2], tf.int32)] * 3
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"last piece 3 to an id of piece 0, outside \[0, 3\)"):
        marks = tf.constant([1, 0b101011], tf.int64), tf.constant([2], tf.int32)
        ops.window_gradients(messages, bounds, *marks, num_segments=1)


def test_numbers_of_segments_out_of_range_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"num_segments must lie in \[1, 1048576\], got"):
        ops.window_gradients(
            [tf.constant([0], tf.int64)], [tf.constant([1], tf.int32)], tf.constant([0], tf.int64),
            tf.constant([1], tf.int32), num_segments=2**40,
        )  # fmt: skip


def test_shape_functions():
    unique_shapes = inferred(
        lambda a, b, c, d: tf.nest.flatten(tuple(ops.window_unique([ops.UniqueIds(a, c, a), ops.UniqueIds(b, d, b)]))),
        (tf.int64, [5]), (tf.int64, [None]), (tf.int64, [3]), (tf.int64, [3]),
    )  # fmt: skip
    assert unique_shapes == [[None], [3], [None], [3], [5], [None], [None]]
    gradients = inferred(
        lambda a, b, c, d: tf.nest.flatten(tuple(ops.window_gradients([a], [b], c, d, num_segments=1))),
        (tf.int64, [None]), (tf.int32, [4]), (tf.int64, [None]), (tf.int32, [4]),
    )  # fmt: skip
    assert gradients == [[None], [4], [None]]
