"""Ops from unique to recovery: kernels of both kinds get equal inputs, and wrong ones."""

from __future__ import annotations

import numpy as np

from tests.cuda.op_kernels import refused, run_op, same
from tests.oracles.join_messages import LIES
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf


def both(op, *arguments, **more):
    """Returns the answer of both kinds of kernels, whose bits are equal."""
    host, device = (run_op(on_device, op, arguments, **more) for on_device in (False, True))
    tf.nest.map_structure(lambda ours, theirs: same(ours.numpy(), theirs.numpy(), op.__name__), host, device)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), host)


def recover_parts(*tensors):
    return ops.pooled_recover_parts(tensors[:3], *tensors[3:], pad=True)


def run_stages(random, segments, most, dtype):
    """Sends a message to this rank and back."""
    lengths = random.integers(0, most, segments)
    ids = random.integers(-most // 2, most // 2, lengths.sum()) * 2**40
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    unique = both(ops.segment_unique, ids, splits)
    ranked = both(ops.rank_partition, unique.ids, unique.splits, num_ranks=3, owner="hash_range")
    sent = ranked.message[: ranked.send_splits.sum()]
    both(ops.unpack_message, sent, ranked.send_splits, num_segments=segments)
    rows = tf.cast(random.integers(-8, 8, [len(unique.ids), 5]), dtype).numpy()  # sums are exact in any order
    index = unique.inverse.astype(np.int32)
    bags = np.sort(random.integers(0, len(index) + 1, 6)).astype(np.int64)
    bags[0], bags[-1] = 0, len(index)
    scale, num_rows = np.full(5, 0.5, np.float32), np.array(len(rows), np.int64)
    both(ops.pooled_recover, rows, index, bags, scale)
    cut = len(rows) // 2
    both(recover_parts, rows[:cut], rows[cut:cut], rows[cut:], index, bags, scale)
    both(ops.pooled_recover_grad, np.ones([5, 5], rows.dtype), index, bags, scale, num_rows)
    for pad in (False, True):
        grads = both(ops.recover, rows, index, pad=pad)
        both(ops.recover_grad, grads, index, num_rows, pad=pad)


def fuse(features, row_splits, bag_sizes):
    """The ids of F features, of which those with row_splits are ragged, for `run_op` and `both`."""
    ragged, count = sorted(row_splits), len(features)

    def op(*tensors):
        return ops.fuse_ids(
            tensors[:count], dict(zip(ragged, tensors[count:])), segments=[f // 2 for f in range(count)],
            num_segments=count, feature_names=[f"f{f}" for f in range(count)], bag_sizes=bag_sizes,
            combiners=[("mean", "sqrtn", "sum")[f % 3] for f in range(count)],
        )  # fmt: skip

    return op, [*(np.array(ids, np.int64) for ids in features), *(np.array(row_splits[f], np.int64) for f in ragged)]


def run_fuse_ids(random):
    """Scales have the bits of the CPU for bags of 0 to 300 ids."""
    lengths = np.arange(300)
    features = [random.integers(-(2**62), 2**62, n) for n in (lengths.sum(), 12, 0, lengths.sum(), 0)]
    splits = np.concatenate([[0], np.cumsum(lengths)])
    op, tensors = fuse(features, {0: splits, 2: [0], 3: splits[::2].tolist() + [splits[-1]]}, [0, 3, 0, 1, 2])
    both(op, *tensors)
    wrong = tf.errors.InvalidArgumentError
    for rows, words in (
        (
            [0, 2, 1, 3],
            "row_splits of feature 'f1' must not decrease, got 2 then 1 at entry 2. Build it from the lengths",
        ),
        ([1, 2, 3], "row_splits of feature 'f1' must run from 0 to 3, got first 1, last 3"),
        ([], "row_splits of feature 'f1' must have at least one entry, got none"),
    ):
        op, tensors = fuse([[1], [1, 2, 3]], {1: rows}, [1, 0])
        for on_device in (False, True):
            refused(wrong, words, lambda: run_op(on_device, op, tensors))  # noqa: B023
    for size, words in ((2, "'f1' must divide its 3 ids"), (0, "or be 0 with row_splits, got 0"), (-1, "got -1")):
        op, tensors = fuse([[1], [1, 2, 3]], {}, [1, size])
        for on_device in (False, True):
            refused(wrong, words, lambda: run_op(on_device, op, tensors))  # noqa: B023


def run_join_messages(random):
    """Messages of three lookups to three ranks and back; headers that lie are refused in the words of the CPU."""
    segments, messages, splits = [1, 3, 40], [], []
    for count in segments:
        lengths = random.integers(0, 9, count)
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ids = random.integers(-(2**62), 2**62, lengths.sum())
        ranked = both(ops.rank_partition, ids, bounds, num_ranks=3, owner="hash_range")
        messages.append(ranked.message)
        splits.append(ranked.send_splits)
    joined, joined_splits = both(lambda *tensors: ops.join_messages(tensors[:3], tensors[3:]), *messages, *splits)
    parts, lengths = both(ops.split_messages, joined[: joined_splits.sum()], joined_splits, segments=segments)
    for part, length, message, of_message in zip(parts, lengths, messages, splits):
        same(part, message[: of_message.sum()], "a message joined and split")
        same(length, of_message, "its blocks")
    for message, of_ranks, words in (
        ([1, 5, 0], [4], "splits[0] must lie in [0, 3], got 4"),
        ([1, 5, 0, 9], [3], "splits must sum to the 4 entries of message, got 3"),
        *LIES,
    ):
        given = np.array(message, np.int64), np.array(of_ranks, np.int32)
        for on_device in (False, True):
            call = lambda: run_op(on_device, ops.split_messages, given, segments=(1, 1))  # noqa: B023, E731
            refused(tf.errors.InvalidArgumentError, words, call)
    wrong = np.array([1, 2, 3]), np.array([2, 2], np.int32)
    call = lambda: run_op(True, lambda m, s: ops.join_messages([m], [s]), wrong)  # noqa: E731
    refused(tf.errors.InvalidArgumentError, "splits[0][1] must lie in [0, 1], got 2", call)


def run_initial_rows(random):
    """Rows of every distribution and type have the bits of the CPU."""
    for name in ("constant", "uniform", "normal", "truncated_normal"):
        for dtype in (tf.float32, tf.float16, tf.bfloat16):
            rows = tf.cast(random.normal(size=[50, 7]), dtype)
            exists, ids = random.integers(0, 2, 50) == 1, random.integers(-(2**63), 2**63 - 1, 50)
            splits = np.array([0, 0, 30, 50])
            more = {"seeds": (1, -(2**63), 7), "distribution": name, "a": -0.7, "b": 1.3}
            both(ops.initial_rows, rows, exists, ids, splits, **more)
            both(ops.initial_rows, rows[:0], exists[:0], ids[:0], np.zeros(4, np.int64), **more)
    arguments = np.zeros([2, 3], np.float32), np.zeros(2, bool), np.arange(2)
    for splits, seeds, words in (
        ([0, 2, 1, 2], (1, 2, 3), "segment_splits must not decrease"),
        ([0, 2], (1, 2), "len(seeds) + 1 = 3 entries, got 2"),
    ):
        for on_device in (False, True):
            more = {"seeds": seeds, "distribution": "uniform", "a": 0.0}
            call = lambda: run_op(on_device, ops.initial_rows, (*arguments, np.array(splits)), **more)  # noqa: B023, E731
            refused(tf.errors.InvalidArgumentError, words, call)


def run_refusals():
    """Refuses too many segments, sizes over 2^31, decreasing offsets, and unsuitable headers."""
    wrong, rows = tf.errors.InvalidArgumentError, np.zeros([3, 4], np.float32)
    index, four = np.zeros(4, np.int32), np.arange(4)
    partition = lambda splits, **more: run_op(True, ops.rank_partition, (four, splits), **{"num_ranks": 2, **more})  # noqa: E731
    unique = lambda splits: run_op(True, ops.segment_unique, (four, splits))  # noqa: E731
    unpack = lambda message, splits: run_op(True, ops.unpack_message, (message, splits), num_segments=2)  # noqa: E731
    size = lambda n: np.array(n, np.int64)  # noqa: E731
    for call in (unique, partition):
        refused(wrong, "splits must not decrease", lambda: call(np.array([0, 3, 1, 4])))  # noqa: B023
        refused(wrong, "splits must run from 0 to 4", lambda: call(np.array([0, 5])))  # noqa: B023
        refused(wrong, "must have at least one entry", lambda: call(np.array([], np.int64)))  # noqa: B023
    refused(wrong, "segments on a GPU", lambda: unique(np.minimum(np.arange(2**20 + 2), 4)))
    empty, many = np.array([], np.int64), np.zeros(2**21 + 1, np.int64)
    refused(
        wrong, "the size of unique_splits must lie in [1, 1048577], got 2097153",
        lambda: run_op(True, ops.rank_partition, (empty, many), num_ranks=1024),
    )  # fmt: skip
    refused(wrong, "num_ranks (on a GPU) must lie in", lambda: partition(np.array([0, 4]), num_ranks=1025))
    refused(wrong, "does not fit the", lambda: partition(np.array([0, 4]), owner="tfra", id_bits=1))
    refused(wrong, "counts 3 ids in segment 0", lambda: unpack(np.array([3, 0, 7]), np.array([3], np.int32)))
    refused(wrong, "received_splits", lambda: unpack(np.array([1, 0, 7]), np.array([4], np.int32)))
    for n in (-1, 2**31):
        refused(wrong, "num_rows must lie in", lambda: run_op(True, ops.recover_grad, (rows, index[:3], size(n))))  # noqa: B023
        bag = index[:3], np.array([0, 3]), np.ones(1, np.float32)
        refused(wrong, "num_rows must lie in", lambda: run_op(True, ops.pooled_recover_grad, (rows[:1], *bag, size(n))))  # noqa: B023
    refused(wrong, "grads must have a row", lambda: run_op(True, ops.recover_grad, (rows, index, size(3))))
    pooled = lambda scale: run_op(True, ops.pooled_recover, (rows, index, np.array([0, 4]), scale))  # noqa: E731
    refused(wrong, "bag_scale must have one entry", lambda: pooled(np.ones(2, np.float32)))


def run_refusals_of_bags():
    """Both kinds refuse wrong bags and indices in the same words, forward and backward."""
    wrong, rows = tf.errors.InvalidArgumentError, np.zeros([3, 4], np.float32)
    good, scale, size = np.zeros(4, np.int32), np.ones(3, np.float32), np.array(3, np.int64)
    for splits, index, words in (
        ([0, 3, 1, 4], good, "bag_splits must not decrease, got 3 then 1 at entry 2. Build it from the lengths"),
        ([1, 1, 2, 4], good, "bag_splits must run from 0 to 4, got first 1, last 4"),
        ([0, 1, 2, 5], good, "bag_splits must run from 0 to 4, got first 0, last 5"),
        ([0, 1, 2, 4], good + [0, 0, 3, 0], "index[2] must lie in [0, 3), got 3. Compose it from the outputs"),
        ([0, 1, 2, 4], good - [0, 1, 0, 0], "index[1] must lie in [0, 3), got -1"),
    ):
        bags = (index.astype(np.int32), np.array(splits, np.int64), scale)
        for on_device in (False, True):
            refused(wrong, words, lambda: run_op(on_device, ops.pooled_recover, (rows, *bags)))  # noqa: B023
            refused(wrong, words, lambda: run_op(on_device, ops.pooled_recover_grad, (rows, *bags, size)))  # noqa: B023


def run():
    random = np.random.default_rng(0)
    for number, (segments, most) in enumerate(((1, 1), (1, 2), (3, 20), (5, 300))):
        run_stages(random, segments, most, (tf.float32, tf.float16, tf.bfloat16)[number % 3])
    run_fuse_ids(random)
    run_join_messages(random)
    run_initial_rows(random)
    run_refusals()
    run_refusals_of_bags()
