"""The cases of benchmarks.ops on a processor: inputs, our op, a plain peer, and the result that both must have."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import harness
from benchmarks.harness.harness import ZipfIds, segment_ids
from tests.oracles.fuse_ids import fuse_ids_oracle
from tests.oracles.initial_rows import initial_row_oracle
from tests.oracles.join_messages import join_oracle, split_oracle
from tests.oracles.rank_partition import rank_partition_oracle
from tests.oracles.recovery import recover_grad_oracle, recover_oracle
from tests.oracles.segment_unique import segment_unique_oracle
from tf_fusedrec import ops, tf

SEGMENTS = 4  # tables of a lookup of join_messages
SEED, STDDEV = 7, 0.05
CHECKED_ROWS = 200  # of initial_rows, few because its oracle is slow Python
NEW, COLUMNS = 32, 64  # of user_states: tokens that a request writes; columns of a block's keys, and of its values


class Case(NamedTuple):
    """Two calls without arguments, traced, and what they return."""

    ours: Callable[[], Any]
    peer: Callable[[], Any]
    peer_name: str
    ids: int  # in a call
    bytes_moved: int  # that any implementation must read and write
    want: Sequence[Any]  # arrays that `ours` returns; empty: the case has compared them
    want_of_peer: Sequence[Any] | None = None  # None: `want`
    axes: Mapping[str, Any] = {}  # sizes that follow from the axes


def segment_unique(n_ids: int, zipf_alpha: float, segments: int) -> Case:
    """One pass over a group of tables against a tf.unique per table."""
    ids, splits = segment_ids(0, n_ids=n_ids, zipf_alpha=zipf_alpha, segments=segments)
    t_ids, t_splits, bounds = tf.constant(ids), tf.constant(splits), splits.tolist()

    def peer() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        unique, inverse, ends = [], [], [tf.constant(0)]
        for begin, end in zip(bounds[:-1], bounds[1:]):
            values, index = tf.unique(t_ids[begin:end])
            unique.append(values)
            inverse.append(index + ends[-1])
            ends.append(ends[-1] + tf.size(values))
        return tf.concat(unique, axis=0), tf.stack(ends), tf.concat(inverse, axis=0)

    want = segment_unique_oracle(ids, splits)
    unique, ours = len(want[0]), functools.partial(ops.segment_unique, t_ids, t_splits)
    moved = 8 * n_ids + 8 * unique + 4 * n_ids
    return Case(ours, peer, "tf.unique per segment", n_ids, moved, want, axes={"unique": unique})


def rank_partition(n_ids: int, ranks: int) -> Case:
    """Ids in the order of their owners against TFRA's partition, which packs no counts of segments."""
    from tf_fusedrec.files.hash_order import tfra_owner
    from tf_fusedrec.tfra.tfra_library import de

    ids, splits, _ = segment_unique_oracle(*segment_ids(0, n_ids=n_ids, zipf_alpha=1.05, segments=26))
    t_ids, t_splits = tf.constant(ids), tf.constant(splits)

    def ours() -> ops.RankedIds:
        ranked = ops.rank_partition(t_ids, t_splits, num_ranks=ranks, owner="tfra")
        return ranked._replace(message=ranked.message[: tf.reduce_sum(ranked.send_splits)])

    def peer() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """As HvdAllToAllEmbedding: ids in rank order, ids per rank and their positions."""
        owner = tf.cast(tf.math.floormod(tf.cast(tf.bitwise.bitwise_and(t_ids, 0x7FFFFFFF), tf.int32), ranks), tf.int32)
        parts = de.data_flow.dynamic_partition(t_ids, owner, ranks)
        positions = de.data_flow.dynamic_partition(tf.range(tf.shape(t_ids)[0]), owner, ranks)
        return tf.concat(parts, axis=0), tf.stack([tf.size(p) for p in parts]), tf.concat(positions, axis=0)

    want = rank_partition_oracle(ids, splits, ranks, "tfra")
    order = np.argsort(tfra_owner(ids, ranks), kind="stable")
    unique, segments = len(ids), len(splits) - 1
    moved = 8 * unique + 8 * (unique + ranks * segments) + 4 * unique
    of_peer, axes = (ids[order], want[2], order), {"n_ids": unique, "segments": segments}
    return Case(ours, peer, "TFRA>DynamicPartition", unique, moved, want, of_peer, axes)


def recovery(n_ids: int, dim: int, direction: str) -> Case:
    """One gather by a composed index, whose time counts, against two; sums in a fixed order against a segment sum."""
    unique_ids, _, inverse = segment_unique_oracle(*segment_ids(0, n_ids=n_ids, zipf_alpha=1.05, segments=26))
    random, unique = np.random.default_rng(0), len(unique_ids)
    restore = random.permutation(unique).astype(np.int32)
    index, unrestore = restore[inverse], np.argsort(restore).astype(np.int32)
    # Sums of small integers are exact in any order, so that all implementations agree in every bit.
    rows, grads = (random.integers(-8, 8, (count, dim)).astype(np.float32) for count in (unique, n_ids))
    moved = 4 * n_ids + 4 * dim * (n_ids + unique)
    t_inverse, t_restore, t_unrestore, t_index = map(tf.constant, (inverse.astype(np.int32), restore, unrestore, index))
    t_rows, t_grads, num_rows = tf.constant(rows), tf.constant(grads), tf.constant(unique, tf.int64)
    if direction == "forward":
        ours = lambda: [ops.recover(t_rows, tf.gather(t_restore, t_inverse))]  # noqa: E731
        peer = lambda: [tf.gather(tf.gather(t_rows, t_restore), t_inverse)]  # noqa: E731
        name, want = "tf.gather twice", recover_oracle(rows, index)
    else:
        ours = lambda: [ops.recover_grad(t_grads, t_index, num_rows)]  # noqa: E731
        peer = lambda: [tf.gather(tf.math.unsorted_segment_sum(t_grads, t_inverse, unique), t_unrestore)]  # noqa: E731
        name, want = "tf.math.unsorted_segment_sum", recover_grad_oracle(grads, index, unique)
    return Case(ours, peer, name, n_ids, moved, [want], axes={"unique": unique})


def fuse_ids(n_ids: int, features: int) -> Case:
    """The ids of many features in one tensor. The peer neither checks row_splits nor returns the bags."""
    random, zipf = np.random.default_rng(0), ZipfIds(10**6, 1.05)
    row_splits = np.linspace(0, n_ids // features, 513).astype(np.int64)
    arrays = [zipf.draw(random, (int(row_splits[-1]),)) for _ in range(features)]
    segments = [f // 2 for f in range(features)]  # two features to a table
    ids, ragged = [tf.constant(a) for a in arrays], dict.fromkeys(range(0, features, 2), tf.constant(row_splits))

    def ours() -> tuple[tf.Tensor, tf.Tensor]:
        return ops.fuse_ids(
            ids, ragged, segments=segments, num_segments=segments[-1] + 1, combiners=["sum"] * features,
            feature_names=[f"f{f}" for f in range(features)],
            bag_sizes=[0 if f in ragged else 1 for f in range(features)],
        )[:2]  # fmt: skip

    def peer() -> tuple[tf.Tensor, tf.Tensor]:
        lengths = tf.stack([tf.size(i, out_type=tf.int64) for i in ids])
        ends = tf.cumsum(tf.math.segment_sum(lengths, segments))
        return tf.concat(ids, axis=0), tf.concat([[0], ends], axis=0)

    want = fuse_ids_oracle(arrays, segments, segments[-1] + 1)[:2]
    total = len(want[0])
    axes = {"n_ids": total, "segments": segments[-1] + 1}
    return Case(ours, peer, "tf.concat, tf.cumsum", total, 16 * total, want, axes=axes)


def join_messages(n_ids: int, lookups: int, ranks: int) -> Case:
    """The ids of several lookups in one message, and split again. The peer gathers by ragged ranges, unchecked."""
    random, segments = np.random.default_rng(0), [SEGMENTS] * lookups
    arrays, sizes = [], []
    for _ in segments:
        counts = random.multinomial(n_ids // lookups, np.full(ranks * SEGMENTS, 1 / (ranks * SEGMENTS)))
        blocks = [[*row, *random.integers(0, 2**40, row.sum())] for row in counts.reshape(ranks, SEGMENTS)]
        arrays.append(np.concatenate(blocks).astype(np.int64))
        sizes.append(np.array([len(block) for block in blocks], np.int32))
    messages, splits = [tf.constant(a) for a in arrays], [tf.constant(s) for s in sizes]

    def ours() -> list[tf.Tensor]:
        joined, joined_splits = ops.join_messages(messages, splits)
        return ops.split_messages(joined[: tf.reduce_sum(joined_splits)], joined_splits, segments=segments)[0]

    def ranges(begins: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
        begins, lengths = tf.reshape(begins, [-1]), tf.reshape(lengths, [-1])
        return tf.ragged.range(begins, begins + lengths).values

    def peer() -> list[tf.Tensor]:
        entries = tf.stack(splits, axis=1)
        base = tf.cumsum(tf.stack([tf.size(message) for message in messages]), exclusive=True)
        joined = tf.gather(tf.concat(messages, axis=0), ranges(base + tf.cumsum(entries, exclusive=True), entries))
        begins, parts = tf.cumsum(tf.reduce_sum(entries, axis=1), exclusive=True), []
        for count in segments:
            header = tf.gather(joined, begins[:, tf.newaxis] + tf.range(count))
            lengths = count + tf.cast(tf.reduce_sum(header, axis=1), tf.int32)
            parts.append(tf.gather(joined, ranges(begins, lengths)))
            begins += lengths
        return parts

    joined, joined_splits = join_oracle([a.tolist() for a in arrays], [s.tolist() for s in sizes])
    want = [np.array(entries) for entries, _ in split_oracle(joined, joined_splits, segments)]
    return Case(ours, peer, "tf.ragged.range, tf.gather", n_ids, 4 * 8 * len(joined), want)


def initial_rows(n_ids: int, dim: int, exists_share: float) -> Case:
    """A row that depends on its id alone. The peer's rows depend on their places: less work, but wrong for a table."""
    ids, splits = segment_ids(0, n_ids=n_ids, zipf_alpha=1.05, segments=1)
    random = np.random.default_rng(0)
    rows, exists = random.random((n_ids, dim), np.float32), random.random(n_ids) < exists_share
    t_rows, t_exists, t_ids, t_splits = map(tf.constant, (rows, exists, ids, splits))

    def ours() -> tf.Tensor:
        return ops.initial_rows(
            t_rows, t_exists, t_ids, t_splits, seeds=[SEED], distribution="normal", a=0.0, b=STDDEV
        )  # fmt: skip

    def peer() -> tf.Tensor:
        drawn = tf.random.stateless_normal(tf.shape(t_rows), seed=[SEED, 0], stddev=STDDEV)
        return tf.where(t_exists[:, tf.newaxis], t_rows, drawn)

    got, new = ours().numpy(), np.flatnonzero(~exists)[:CHECKED_ROWS]
    harness.check_equal("rows that exist", got[exists], rows[exists])
    if new.size:
        want = [initial_row_oracle("normal", 0.0, STDDEV, SEED, int(ids[n]), dim) for n in new]
        reason = "log, sin and cos in float32 against Python's float64"
        harness.check_close("new rows", got[new], want, relative=1e-6, reason=reason)
    return Case(ours, peer, "tf.random.stateless_normal", n_ids, 9 * n_ids + 2 * 4 * dim * n_ids, [])


def window_rows(n_ids: int, pieces: int, zipf_alpha: float) -> Case:
    """The plan of rows and gradients by micro-batch, for ids of one table, sorted by owner. The peer makes no marks."""
    drawn = np.minimum(np.random.default_rng(0).zipf(zipf_alpha, n_ids), 2**40)
    parts = [tf.constant(list(dict.fromkeys(part.tolist())), tf.int64) for part in np.array_split(drawn, pieces)]
    unique = [ops.UniqueIds(part, tf.constant([0, len(part)], tf.int64), None) for part in parts]
    # One owner: the order by owner is the order of segments, in which the peer's terms come.
    ranked = [ops.rank_partition(*new, num_ranks=1) for new in ops.window_unique(unique).new]
    restore = [one.restore for one in ranked]

    def ours() -> list[tf.Tensor]:
        route = ops.window_route(ops.window_unique(unique), ranked, num_segments=1)
        return [tf.concat(part, axis=0) for part in (route.rows, route.term_index)]

    def peer() -> tuple[tf.Tensor, tf.Tensor]:
        piece_of = tf.repeat(tf.range(len(parts)), [tf.size(part) for part in parts])
        ids, number = tf.unique(tf.concat(parts, axis=0))
        last = tf.math.unsorted_segment_max(piece_of, number, tf.size(ids))
        begins = tf.cumsum([tf.size(part) for part in restore], exclusive=True)
        row_of = tf.concat([begin + part for begin, part in zip(tf.unstack(begins), restore)], axis=0)
        rows = tf.gather(row_of, number)
        return rows, tf.argsort(tf.gather(last, number) * tf.size(ids) + rows, stable=True)

    count = sum(len(part) for part in parts)
    return Case(ours, peer, "tf.unique, tf.argsort", count, (8 + 4 + 4 + 4) * count, peer())


def user_states(tokens: int, blocks: int, dtype: str) -> Case:
    """A find and a put in the cache of user states, against a program that concatenates its own tensors."""
    parts = ops.StateParts(((tf.as_dtype(dtype), COLUMNS),) * 2 * blocks, ())
    random = np.random.default_rng(0)
    state, new = (
        [tf.cast(random.normal(size=[length, columns]), kind) for kind, columns in parts.of_token]
        for length in (tokens, NEW)
    )
    cache = ops.user_states(parts, max_bytes=2**30, anonymous=True)
    version = now = tf.constant(0, tf.int64)

    def write(user: int, of_tokens: list[tf.Tensor]) -> None:
        ops.user_states_write(
            cache, tf.constant([user], tf.int64), version, now, revisions=tf.constant([0], tf.int64),
            row_splits=tf.stack([0, tf.shape(of_tokens[0], tf.int64)[0]]), of_tokens=of_tokens, of_users=[],
        )  # fmt: skip

    def ours() -> list[tf.Tensor]:
        found = ops.user_states_find(cache, tf.constant([1], tf.int64), version, now, parts=parts)
        write(2, new)  # A put of a small state costs what an append costs, and the state keeps its length.
        return found.of_tokens

    def peer() -> list[tf.Tensor]:
        return [tf.concat([before, of_part], axis=0) for before, of_part in zip(state, new)]

    write(1, state)
    moved = 2 * (tokens + NEW) * 2 * blocks * COLUMNS * tf.as_dtype(dtype).size
    return Case(ours, peer, "tf.concat", tokens, moved, state, peer())


# Each axis has its values with --quick and without.
AXES: dict[Callable[..., Case], dict[str, tuple[Sequence[Any], Sequence[Any]]]] = {
    segment_unique: {
        "n_ids": ([50_000], [50_000, 1_000_000]), "zipf_alpha": ([1.05], [0.8, 1.05, 1.3]),
        "segments": ([1, 26], [1, 26]),
    },
    rank_partition: {"n_ids": ([50_000], [50_000, 1_000_000]), "ranks": ([2], [2, 8, 64])},
    recovery: {
        "n_ids": ([50_000], [50_000, 500_000]), "dim": ([16], [16, 64]),
        "direction": (["forward", "backward"], ["forward", "backward"]),
    },
    fuse_ids: {"n_ids": ([50_000], [50_000, 1_000_000]), "features": ([26], [26, 200])},
    join_messages: {"n_ids": ([50_000], [8_000, 50_000, 800_000]), "lookups": ([8], [2, 8]), "ranks": ([2, 8], [2, 8])},
    initial_rows: {
        "n_ids": ([20_000], [20_000, 200_000]), "dim": ([16], [16, 64]),
        "exists_share": ([0.0, 0.5, 1.0], [0.0, 0.5, 1.0]),
    },
    window_rows: {
        "n_ids": ([50_000], [8_000, 50_000, 800_000]), "pieces": ([8], [4, 8, 16]), "zipf_alpha": ([1.1, 1.5],) * 2
    },
    user_states: {
        "tokens": ([1024], [256, 4096]), "blocks": ([4], [2, 8]), "dtype": (["float32", "bfloat16"],) * 2
    },
}  # fmt: skip
CASES = {case.__name__: case for case in AXES}


def measure(name: str, quick: bool) -> list[dict[str, Any]]:
    """Returns a record for each case of an op, after its results are checked.

    Fields: the axes, peer, ms_ and ms_p90_ of both, ratio (peer / ours), ids_per_s and bytes_per_s of ours, ms_floor:
    the time in which one thread copies as many bytes as any implementation must move.
    """
    make, copy = CASES[name], harness.Copy(threads=1)
    bandwidth = copy.bytes_moved / harness.measure({"copy": copy}, warmup=1, repeats=7)["copy"].median_s
    axes = {axis: values[0 if quick else 1] for axis, values in AXES[make].items()}
    records = []
    for values in itertools.product(*axes.values()):
        case = make(*values)
        calls = {"ours": tf.function(case.ours, autograph=False), "peer": tf.function(case.peer, autograph=False)}
        for who, want in (("ours", case.want), ("peer", case.want if case.want_of_peer is None else case.want_of_peer)):
            got = calls[who]()
            for part in range(len(want)):
                harness.check_equal(f"result {part} of {name}, {who}", got[part], want[part])
        times = harness.measure(calls, warmup=5, repeats=15 if quick else 60)
        seconds = times["ours"].median_s
        records.append({
            **dict(zip(axes, values)), **case.axes, "peer": case.peer_name,
            "ms_ours": 1e3 * seconds, "ms_p90_ours": 1e3 * times["ours"].p90_s,
            "ms_peer": 1e3 * times["peer"].median_s, "ms_p90_peer": 1e3 * times["peer"].p90_s,
            "ratio": times["peer"].median_s / seconds, "ids_per_s": case.ids / seconds,
            "bytes_per_s": case.bytes_moved / seconds, "ms_floor": 1e3 * case.bytes_moved / bandwidth,
        })  # fmt: skip
    return records
