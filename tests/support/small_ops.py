"""The ops without a table in TensorFlow for tests/cuda/checks: NumPy arrays in and out. REFUSALS lists refusals.

tests/ops runs the kernels for the CPU, tests/cuda/run_op_kernels.py those for a GPU over the emulation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tests.cuda.checks.jagged_attention_call import PARAMETERS, TOKENS, from_bits, to_bits
from tests.cuda.launchers import OPS
from tests.oracles.join_messages import LIES
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf


def checks(names: Iterable[str] = OPS) -> dict[str, Callable]:
    """Returns the checks of ops that need no launcher, by op and name."""
    modules = {op: importlib.import_module(f"tests.cuda.checks.{op}") for op in names}
    return {
        f"{op}: {name}": getattr(module, name)
        for op, module in modules.items()
        for name in dir(module)
        if name.startswith("check_") and not name.startswith("check_launcher")
    }


def _tensor(values: Any, dtype: Any) -> tf.Tensor:
    """Returns a tensor; np.uint16 arrays are the bits of bfloat16."""
    if isinstance(values, np.ndarray) and values.dtype == np.uint16:
        return tf.bitcast(tf.constant(values), tf.bfloat16)
    return tf.constant(values, values.dtype if dtype is None else dtype)


def _array(tensor: tf.Tensor) -> np.ndarray:
    return (tf.bitcast(tensor, tf.uint16) if tensor.dtype == tf.bfloat16 else tensor).numpy()


class TensorFlowOps:
    """Methods as those of tests.cuda.launchers.Launchers.

    Args:
      labels: Of the kernels to use, by op; empty: the kernels for the CPU.
    """

    times_of_float32 = 8  # a CPU's sums and exponentials; a norm divides by a small deviation

    def __init__(self, labels: dict[str, str] | None = None):
        self.labels = labels

    def _run(self, op, *inputs):
        """inputs: pairs of values and dtype; lists of arrays are given as one pair each."""
        tensors = [_tensor(values, dtype) for values, dtype in inputs]

        def labelled(*given):
            with tf.compat.v1.get_default_graph()._kernel_label_map(self.labels):
                return op(*given)

        answer = self._call(tf.function(labelled), tensors) if self.labels else op(*tensors)
        return tf.nest.map_structure(_array, answer)

    def _call(self, function, tensors):
        return function(*tensors)

    def segment_unique(self, ids, splits):
        return self._run(ops.segment_unique, (ids, tf.int64), (splits, tf.int64))

    def rank_partition(self, ids, splits, ranks, owner, id_bits=64, names=()):
        op = lambda i, s: ops.rank_partition(  # noqa: E731
            i, s, num_ranks=ranks, owner=owner, id_bits=id_bits, segment_names=names
        )
        return self._run(op, (ids, tf.int64), (splits, tf.int64))

    def unpack_message(self, messages, segments):
        flat = [entry for message in messages for entry in message]
        op = lambda m, s: ops.unpack_message(m, s, num_segments=segments)  # noqa: E731
        return self._run(op, (flat, tf.int64), ([len(message) for message in messages], tf.int32))

    def join_messages(self, messages, splits):
        op = lambda *t: ops.join_messages(t[: len(messages)], t[len(messages) :])  # noqa: E731
        return self._run(op, *((m, tf.int64) for m in messages), *((s, tf.int32) for s in splits))

    def split_messages(self, message, splits, segments):
        op = lambda m, s: ops.split_messages(m, s, segments=segments)  # noqa: E731
        return self._run(op, (message, tf.int64), (splits, tf.int32))

    def fuse_ids(self, features, row_splits, bag_sizes, combiners, segments=None, num_segments=1):
        count, ragged = len(features), sorted(row_splits)
        op = lambda *t: ops.fuse_ids(  # noqa: E731
            t[:count], dict(zip(ragged, t[count:])), segments=segments or [0] * count, num_segments=num_segments,
            feature_names=[f"f{f}" for f in range(count)], bag_sizes=bag_sizes, combiners=combiners,
        )  # fmt: skip
        fused = self._run(op, *((values, tf.int64) for values in (*features, *(row_splits[f] for f in ragged))))
        return fused.ids, fused.bag_splits, fused.bag_scale

    def initial_rows(self, rows, exists, ids, splits, seeds, distribution, a, b):
        op = lambda *t: ops.initial_rows(*t, seeds=seeds, distribution=distribution, a=a, b=b)  # noqa: E731
        inputs = (rows, None), (np.array(exists, bool), tf.bool), (ids, tf.int64), (splits, tf.int64)
        return self._run(op, *inputs)

    def recover(self, rows, index):
        return self._run(lambda r, i: ops.recover(r, i, pad=True), (rows, None), (index, tf.int32))

    def recover_grad(self, grads, index, num_rows, bags=None):
        inputs = (grads, None), (index, tf.int32)
        if bags is None:
            return self._run(lambda *t: ops.recover_grad(*t, pad=True), *inputs, (num_rows, tf.int64))
        bag_inputs = (bags[0], tf.int64), (bags[1], tf.float32), (num_rows, tf.int64)
        return self._run(lambda *t: ops.pooled_recover_grad(*t, pad=True), *inputs, *bag_inputs)

    def pooled_recover(self, parts, index, splits, scale):
        inputs = (index, tf.int32), (splits, tf.int64), (scale, tf.float32)
        if len(parts) == 1:
            return self._run(ops.pooled_recover, (parts[0], None), *inputs)
        op = lambda *t: ops.pooled_recover_parts(t[: len(parts)], *t[len(parts) :], pad=True)  # noqa: E731
        return self._run(op, *((part, None) for part in parts), *inputs)

    def attention(self, type_, case, grads=None):
        inputs = {name: (to_bits(type_, case[name]), None) for name in TOKENS[:4] if name in case}
        inputs.update({n: (np.asarray(case[n], np.float32), None) for n in PARAMETERS if case.get(n) is not None})

        def op(*tensors):
            given = dict(zip(inputs, tensors))
            with tf.GradientTape() as tape:
                tape.watch(given)
                out = _attend(case, given)
            if grads is not None:
                found = tape.gradient(out, given, tf.cast(grads, out.dtype), tf.UnconnectedGradients.ZERO)
                return {f"{name.removesuffix('_weights')}_grads": grad for name, grad in found.items()}
            if "gate" not in case:
                return {"out": out}
            return {"out": _attend(case, {n: x for n, x in given.items() if n != "gate"}), "gated": out}

        found = self._run(op, *inputs.values())
        return {name: x if x.dtype == np.float32 else from_bits(type_, x) for name, x in found.items()}


def _attend(case, given):
    """Returns the output of the op for the arguments of a case, of which `given` are tensors."""
    masks, bias, time, times = dict(case.get("masks", {})), None, None, None
    if isinstance(masks.get("contextual_length"), list):
        masks["contextual_length"] = np.array(masks["contextual_length"], np.int64)
    if "time_weights" in given:
        table = ops.BucketTable(given["time_weights"], case["thresholds"])
        time = table if case["time"] == "buckets" else ops.TimeFunction(case["time"], given["time_weights"])
        times = ops.SequenceTimes(case["asks"], case["answers"])
    if time is not None or "position_weights" in given:
        bias = ops.RelativeBias(given.get("position_weights"), time, times)
    more = {"num_targets": case.get("num_targets"), "query_splits": case.get("query_splits"), "bias": bias, **masks}
    if "query" not in given:
        return ops.bias_attention(given["value"], case["row_splits"], **more)
    if "gate" in given:
        norm = given.get("norm_weight"), given.get("norm_bias"), case["per_head"], case["gate_first"]
        more["gate"] = ops.OutputGate(given["gate"], *norm, epsilon=case["epsilon"])
    if "dropout" in case:
        more.update(dropout=case["dropout"], dropout_seed=tf.constant(case["dropout_seed"], tf.int64))
    tokens, scale = [given[name] for name in ("query", "key", "value")], case["scale"]
    scale = tf.constant(np.multiply(scale, 1 - case.get("dropout", 0)), tf.float32)
    return ops.jagged_attention(*tokens, case["row_splits"], scale=scale, alpha=case["alpha"], **more)


def _fuse(features, row_splits=None, bag_sizes=None, combiners=None, **more):
    count = len(features)
    about = row_splits or {}, bag_sizes or [1] * count, combiners or ["sum"] * count
    return lambda run: run.fuse_ids(features, *about, **more)


def _draw(splits, exists=(False, False), seeds=(1, 2, 3)):
    rows = np.zeros([2, 3], np.float32)
    return lambda run: run.initial_rows(rows, exists, [1, 2], splits, list(seeds), "uniform", 0.0, 1.0)


def _bags(index, splits, scale, words):
    """Both the pooled form and its gradient refuse."""
    rows = np.zeros([4, 2], np.float32)
    grads, pooled = rows[: len(scale)], (index, splits, scale)
    return [
        (lambda run: run.pooled_recover([rows], *pooled), words),
        (lambda run: run.recover_grad(grads, index, 4, pooled[1:]), words),
    ]


def _parts(shapes, index, words):
    parts = [np.zeros(shape, np.float32) for shape in shapes]
    return lambda run: run.pooled_recover(parts, index, [0, 1], [1.0]), words


ROWS, WIDE = np.zeros([2, 2], np.float32), np.minimum(np.arange(2**20 + 2), 3)
# A call of wrong input, and the words of the refusal, which are the same on every device.
REFUSALS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda run: run.segment_unique([1, 2, 3], [0, 4]), "segment_splits must run from 0 to 3, got first 0, last 4"),
    (lambda run: run.segment_unique([1, 2, 3], [1, 3]), "segment_splits must run from 0 to 3, got first 1"),
    (lambda run: run.segment_unique([1, 2, 3], [0, 2, 1, 3]), "must not decrease, got 2 then 1 at entry 2"),
    (lambda run: run.segment_unique([1, 2, 3], []), "segment_splits must have at least one entry"),
    (lambda run: run.segment_unique([[1, 2]], [0, 2]), "rank 1"),
    (lambda run: run.segment_unique([1, 2, 3], WIDE), "the size of segment_splits must lie in [1, 1048577]"),
    (
        lambda run: run.rank_partition([1, 2], [0, 3], 2, "tfra"),
        "unique_splits must run from 0 to 2, got first 0, last 3",
    ),
    (lambda run: run.rank_partition([1, 2], [0, 2, 1, 2], 2, "tfra"), "unique_splits must not decrease"),
    (lambda run: run.rank_partition([1, 2, 3], WIDE, 2, "tfra"), "the size of unique_splits must lie in [1, 1048577]"),
    (lambda run: run.rank_partition([1], [0, 1], 2**16 + 1, "tfra"), "num_ranks must lie in [1, 65536], got 65537"),
    (
        lambda run: run.rank_partition([1, 2, -5], [0, 2, 3], 2, "tfra", 61, ["item", "user"]),
        "id -5 of table 'user' does not fit the 61 bits",
    ),
    (lambda run: run.rank_partition([7, 8], [0, 0, 2], 2, "tfra", 3), "id 8 of segment 1 does not fit the 3 bits"),
    (
        lambda run: run.rank_partition([3, 15, 16, -1, 2], [0, 5], 2, "tfra", 4),
        "id 16 of segment 0 does not fit the 4 bits",
    ),
    (lambda run: run.rank_partition([7, 8], [0, 2], 2, "tfra", 3), "Use key_encoding='hash'"),
    (lambda run: run.rank_partition([7, -1], [0, 2], 2, "tfra", 63), "id -1 of segment 0 does not fit the 63 bits"),
    (lambda run: run.unpack_message([[1]], 2), "received_splits[0] must lie in [2, 1], got 1"),
    (
        lambda run: run.unpack_message([[3, 0, 1]], 2),
        "message of rank 0 counts 3 ids in segment 0, more than its 1 ids",
    ),
    (lambda run: run.unpack_message([[0, 0], [-1, 1]], 2), "message of rank 1 counts -1 ids in segment 0"),
    (lambda run: run.unpack_message([[0, 1, 5, 6]], 2), "message of rank 0 counts 1 ids but holds 2"),
    (
        lambda run: run.unpack_message([[2**62, 2**62]], 2),
        "message of rank 0 counts 4611686018427387904 ids in segment 0",
    ),
    *(
        (lambda run, s=splits: run.join_messages([[1, 2, 3], [4, 5, 6]], s), words)
        for splits, words in (
            ([[2, 1], [3]], "splits[1] must have one entry per rank, 2 like splits[0], got 1"),
            ([[2, 2], [3, 0]], "splits[0][1] must lie in [0, 1], got 2"),
            ([[3, -1], [3, 0]], "splits[0][1] must lie in [0, 0], got -1"),
            ([[2, 1], [2**31 - 1, 0]], "splits[1][0] must lie in [0, 3], got 2147483647"),
            ([[2, 1], 1], "rank 1"),
        )
    ),
    *(
        (lambda run, m=message, s=splits: run.split_messages(m, s, [1, 1]), words)
        for message, splits, words in (
            ([1, 5, 0], [4], "splits[0] must lie in [0, 3], got 4"),
            ([1, 5, 0], [3, -1], "splits[1] must lie in [0, 0], got -1"),
            ([1, 5, 0, 9], [3], "splits must sum to the 4 entries of message, got 3"),
            ([[0]], [1], "rank 1"),
            *LIES,
        )
    ),
    *(
        (
            lambda run, n=wrong: run.split_messages([0, 0], [2], [1, n]),
            f"segments must lie in [1, 1048576], got {wrong}",
        )
        for wrong in (0, -1, 2**40)
    ),
    *(
        (_fuse([[7], [1, 2, 3]], bag_sizes=[1, n]), f"must divide its 3 ids, or be 0 with row_splits, got {n}")
        for n in (0, 2, -1)
    ),
    *(
        (_fuse([[7], [1, 2, 3]], {1: splits}, [1, 0]), f"row_splits of feature 'f1' must {words}")
        for splits, words in (
            ([0, 5], "run from 0 to 3, got first 0, last 5"),
            ([0, 2, 1, 3], "not decrease, got 2 then 1 at entry 2"),
            ([1, 3], "run from 0 to 3, got first 1"),
            ([], "have at least one entry"),
        )
    ),
    (_fuse([[7]], combiners=["max"]), "combiners must be 'sum', 'mean' or 'sqrtn', got 'max'"),
    *(
        (_fuse([[1], [2]], segments=segments, num_segments=2), "segments must not decrease")
        for segments in ([1, 0], [0, 2], [-1, 0])
    ),
    (_draw([0, 0, 1, 2], [True]), "one entry for each of the 2 ids, got 2 and 1"),
    (_draw([0, 2]), "len(seeds) + 1 = 4 entries, got 2"),
    (_draw([0, 2, 1, 2]), "segment_splits must not decrease"),
    (lambda run: run.recover_grad(ROWS, [0, 0, 0], 4), "a row for each of the 3 entries of index, got 2"),
    (lambda run: run.recover_grad(ROWS, [0], 2, ([0, 1], [1.0])), "a row for each of the 1 bags, got 2"),
    *(
        (lambda run, n=n: run.recover_grad(ROWS, [0, 0], n), f"must lie in [0, 2147483647], got {n}")
        for n in (-1, 2**31)
    ),
    *_bags([0, 4], [0, 2], [1.0], "index[1] must lie in [0, 4), got 4. Compose it from the outputs"),
    *_bags([0, -1], [0, 2], [1.0], "index[1] must lie in [0, 4), got -1"),
    *_bags([0, 1], [0, 3], [1.0], "bag_splits must run from 0 to 2, got first 0, last 3"),
    *_bags([0, 1], [1, 2], [1.0], "bag_splits must run from 0 to 2, got first 1, last 2"),
    *_bags([0, 1], [0, 2, 1, 2], [1.0] * 3, "bag_splits must not decrease, got 2 then 1 at entry 2. Build it from"),
    *_bags([0, 1], [0, 2], [1.0, 1.0], "bag_scale must have one entry for each of the 1 bags, got 2"),
    _parts([[2, 3], [2, 4]], [0], "rows[1] must have the 3 columns of rows[0], got 4"),
    _parts([[2, 3], [6]], [0], "rank 2"),
    _parts([[2, 3], [1, 3]], [3], "index[0] must lie in [0, 3), got 3"),
    _parts([[2, 3], [1, 3]], [-1], "index[0] must lie in [0, 3), got -1"),
    _parts([[2, 3], [1, 3]], [0, 1], "bag_splits must run from 0 to 2, got first 0, last 1"),
]
