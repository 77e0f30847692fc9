"""Rows whose last tokens alone ask (query_splits): the definitions, the bits of whole rows, refusals by name."""

import dataclasses

import numpy as np
import pytest

from tests.support.attention import Arrays, Case, assert_close
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import stock_attention

# A long row with few queries, no query, every token, an empty row, rows of one panel in part and whole.
LENGTHS, QUERIES = (300, 70, 130, 0, 40, 40), (90, 0, 130, 0, 7, 40)
CASES = {
    "causal": {},
    "targets": {"targets": 5, "position": True},
    "target_groups": {"targets": 9, "target_group_size": 2, "time": "buckets"},
    "window": {"attention_window": 4, "targets": 2, "position": True, "time": "buckets"},
    "window_full": {"attention_window": 3, "min_full_length": 4},
    "semi_local": {"attention_window": 4, "global_window": 3, "contextual_length": 2},
    "context": {"contextual_length": (3, 0, 2, 0, 5, 1), "targets": 9, "position": True, "time": "power"},
    "far_times": {"time": "buckets", "far": True},
    "one_time": {"targets": 90, "position": True, "time": "buckets", "one_time": True},
    "one_far_time": {"targets": 90, "time": "buckets", "far": True, "one_time": True, "seed": 1},
}
SPLITS, QUERY_SPLITS = np.array([0, 1, 4]), np.array([0, 0, 2])


def test_gradients_of_rows_of_several_units():
    assert_close(Case((1100, 3, 700), 2, 4, 4, queries=(1000, 2, 70)))
    assert_close(Case((700,), 2, 4, 4, targets=80, contextual_length=2, position=True, time="buckets", queries=(650,)))


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_queries_have_the_bits_of_whole_rows(options):
    """Rows of at most 64 tokens without bias are summed in another order, so no row here is as short."""
    case = Case((300, 70, 130, 0, 65), heads=3, qk_dim=16, value_dim=8, **options)
    if isinstance(case.contextual_length, tuple):
        case = dataclasses.replace(case, contextual_length=case.contextual_length[:5])
    arrays = Arrays(case)
    for queries in ((90, 0, 130, 0, 1), (1, 70, 65, 0, 9), (300, 70, 130, 0, 65)):
        fewer = Arrays(dataclasses.replace(case, queries=queries))
        fewer.weights["query"] = arrays.weights["query"][fewer.case.asking]
        fewer.num_targets = None if arrays.num_targets is None else np.minimum(arrays.num_targets, queries)
        arrays.num_targets = fewer.num_targets  # Both have the same targets.
        for channels in (False, True) if case.position or case.time else (False,):
            whole = arrays.ours(arrays.weights, channels).numpy()
            np.testing.assert_array_equal(fewer.ours(fewer.weights, channels), whole[fewer.case.asking])


def test_candidates_in_pieces_have_the_bits_of_all_at_once():
    """The pieces meet the same keys and values of the history (M-FALCON)."""
    arrays = Arrays(Case((330,), heads=2, qk_dim=8, value_dim=8, position=True, time="buckets"))
    history, weights = 300, arrays.weights

    def candidates(begin, end):
        tokens = np.r_[0:history, begin:end]
        times = ops.SequenceTimes(tf.constant(arrays.asks[begin:end]), tf.constant(arrays.answers[tokens]))
        return ops.jagged_attention(
            weights["query"][begin:end],
            weights["key"][tokens],
            weights["value"][tokens],
            [0, len(tokens)],
            scale=arrays.scale[begin:end],
            alpha=0.7,
            num_targets=[end - begin],
            bias=arrays.bias(weights)._replace(times=times),
            query_splits=[0, end - begin],
        )

    together = candidates(history, 330)
    for pieces in ((300, 301, 317, 330), tuple(range(300, 331))):
        parts = [candidates(begin, end) for begin, end in zip(pieces, pieces[1:])]
        np.testing.assert_array_equal(tf.concat(parts, axis=0), together)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("lengths", [(LENGTHS, QUERIES), ((5, 0), (0, 0)), ((), ())], ids=["mixed", "none", "no_rows"])
def test_stock_operations_agree(options, lengths):
    case = Case(lengths[0], **options, queries=lengths[1])
    if isinstance(case.contextual_length, tuple):
        case = dataclasses.replace(case, contextual_length=case.contextual_length[: len(case.lengths)])
    arrays = Arrays(case)
    weights = {name: tf.constant(weight) for name, weight in arrays.weights.items()}
    for channels in (False, True) if case.position or case.time else (False,):
        ours = arrays.ours(weights, channels)
        stock = arrays.computed(stock_attention, weights, channels)
        # Sums of a few hundred float32 products in another order, relative to the largest entry.
        np.testing.assert_allclose(stock, ours, rtol=0, atol=1e-5 * np.max(np.abs(ours), initial=1.0))


def test_a_graph_differentiates_and_knows_the_shapes():
    tokens, splits = (tf.float32, [None, 2, 8]), (tf.int64, [3])

    def attend(q, k, v, rows, queries):
        return ops.jagged_attention(q, k, v, rows, scale=1.0, query_splits=queries)

    def channels(v, rows, weights, queries):
        return ops.bias_attention(v, rows, bias=ops.RelativeBias(weights), query_splits=queries)

    of_keys = (tf.float32, [9, None, 8]), (tf.float32, [None, None, 3])
    assert inferred(attend, (tf.float32, [7, 2, None]), *of_keys, splits, splits) == [[7, 2, 3]]
    assert inferred(channels, (tf.float32, [9, 2, 8]), splits, (tf.float32, [None]), splits) == [[None, 2, 8]]
    with pytest.raises(ValueError, match="must be rank 3"):
        inferred(attend, tokens, (tf.float32, [9, 14]), tokens, splits, splits)


@pytest.mark.parametrize(
    ("query_splits", "words"),
    [
        ([0, 2], "query_splits must have one entry per entry of row_splits, that is 3, got 2"),
        ([0, 2, 2], "query_splits must give row 0 at most one query per token, that is 1, got 2"),
        ([0, 0, 3], "query_splits must run from 0 to 2, got first 0, last 3"),
        ([0, -1, 2], "query_splits must not decrease, got 0 then -1 at entry 1"),
        ([0, -(2**63), 2], "query_splits must not decrease, got 0 then -9223372036854775808 at entry 1"),
        ([[0, 0, 2]], "query_splits must have rank 1"),
    ],
)
def test_wrong_query_splits(query_splits, words):
    tokens = tf.zeros([4, 2, 3])
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=f"{words}|must be rank 1"):
        ops.jagged_attention(tokens[:2], tokens, tokens, SPLITS, scale=1.0, query_splits=query_splits)


def test_other_wrong_arguments():
    tokens, query, refused = tf.zeros([4, 2, 3]), tf.zeros([2, 2, 3]), tf.errors.InvalidArgumentError

    def attend(query=query, key=tokens, value=tokens, **rest):
        return ops.jagged_attention(query, key, value, SPLITS, **{"scale": 1.0, "query_splits": QUERY_SPLITS, **rest})

    assert attend().shape == [2, 2, 3]
    with pytest.raises(refused, match=r"key must have the heads and columns of query \[2,2,3\], got \[4,1,3\]"):
        attend(key=tokens[:, :1])
    with pytest.raises(refused, match=r"value must have the tokens and heads of key \[4,2,3\], got \[3,2,3\]"):
        attend(value=tokens[:3])
    with pytest.raises(refused, match=r"key must have the shape of query .* pass query_splits"):
        ops.jagged_attention(query, tokens, tokens, SPLITS, scale=1.0)
    with pytest.raises(refused, match=r"scale must have shape \[\] or \[2\]"):
        attend(scale=tf.ones(4))
    with pytest.raises(refused, match=r"num_targets\[1\] must be at most the row's queries 2, got 3"):
        attend(num_targets=[0, 3])
    times = ops.SequenceTimes(tf.zeros(4, tf.int64), tf.zeros(4, tf.int64))
    with pytest.raises(refused, match="asks must have one time per token, that is 2, got 4"):
        attend(bias=ops.RelativeBias(time=ops.TimeFunction("power", tf.zeros(2)), times=times))


@pytest.mark.parametrize("channels", [False, True])
def test_graphs_of_earlier_versions_lack_query_splits(channels):
    """Their nodes have neither the input nor the attribute."""
    arrays = Arrays(Case((5, 0, 9), targets=2, position=True))
    graph = tf.Graph()
    with graph.as_default():
        out = arrays.ours({name: tf.constant(weight) for name, weight in arrays.weights.items()}, channels)
    want = arrays.ours(arrays.weights, channels)
    earlier = graph.as_graph_def()
    [node] = [node for node in earlier.node if "Attention" in node.op]
    del node.attr["num_query_splits"]
    with tf.Graph().as_default() as graph:
        [out] = tf.graph_util.import_graph_def(earlier, return_elements=[out.name], name="")
        with tf.compat.v1.Session(graph=graph) as session:
            np.testing.assert_array_equal(session.run(out), want)
