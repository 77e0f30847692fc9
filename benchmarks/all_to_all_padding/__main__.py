"""Question: how much time does an all-to-all save when its send buffer is padded to a bucket?

    python -m benchmarks.all_to_all_padding [--quick] [--json FILE]

A padded buffer keeps its first dimension from step to step, so that Horovod's response cache replaces a negotiation
(custom_ops/common/bucket.h). The peer sends buffers of the exact size, which changes at every step. The padding does
not travel. `at_once` independent all-to-alls run in one call, like the all-to-alls of several groups of tables.
"""

import itertools
import time
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness
from tf_fusedrec import ops, tf
from tf_fusedrec.exchange import collectives

RANKS = 2
DIM = 16
_WARMUP = 20


def _exchange(name: str, at_once: int) -> tf.types.experimental.PolymorphicFunction:
    @tf.function(input_signature=[tf.TensorSpec([None, DIM], tf.float32), tf.TensorSpec([RANKS], tf.int32)])
    def exchange(rows: tf.Tensor, splits: tf.Tensor) -> list[tf.Tensor]:
        return [collectives.all_to_all(rows, splits, name=f"{name}/{n}")[0] for n in range(at_once)]

    return exchange


def rows_of(rank: int, step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sent rows <float32>[n, D], n within 5 % of `rows` as after deduplication, and splits <int32>[R]."""
    random = np.random.default_rng((step, rank))
    n = int(rows * random.uniform(0.95, 1.05))
    to_first = int(n * random.uniform(0.45, 0.55))
    return random.random((n, DIM), np.float32), np.array([to_first, n - to_first], np.int32)


def _arriving(step: int, rows: int) -> np.ndarray:
    """Returns the rows that this rank must receive: its block of every rank."""
    me, blocks = collectives.rank(), []
    for rank in range(RANKS):
        sent, splits = rows_of(rank, step, rows)
        begin = int(splits[:me].sum())
        blocks.append(sent[begin : begin + splits[me]])
    return np.concatenate(blocks)


def _measure(rows: int, at_once: int, repeats: int) -> dict[str, Any]:
    exchanges = {name: _exchange(f"{name}/{rows}/{at_once}", at_once) for name in ("padded", "exact")}
    seconds: dict[str, list[float]] = {name: [] for name in exchanges}
    for step in range(_WARMUP + repeats):
        sent, splits = rows_of(collectives.rank(), step, rows)
        exact = tf.constant(sent)
        buffers = {"exact": exact, "padded": ops.recover(exact, tf.range(len(sent)), pad=True)}
        names = list(buffers) if step % 2 else list(buffers)[::-1]
        for name in names:
            collectives.barrier()
            begin = time.perf_counter()
            received = exchanges[name](buffers[name], tf.constant(splits))
            if step >= _WARMUP:
                seconds[name].append(time.perf_counter() - begin)
            else:
                for block in received:
                    harness.check_equal(f"rows received from {name} buffers", block, _arriving(step, rows))
    slowest = {name: collectives.all_gather(np.array(s)[np.newaxis]).max(axis=0) for name, s in seconds.items()}
    timings = {name: harness.timing(s / at_once) for name, s in slowest.items()}
    return {
        "rows": rows,
        "dim": DIM,
        "at_once": at_once,
        "ms_padded": 1e3 * timings["padded"].median_s,
        "ms_p90_padded": 1e3 * timings["padded"].p90_s,
        "ms_exact": 1e3 * timings["exact"].median_s,
        "ms_p90_exact": 1e3 * timings["exact"].p90_s,
        "ratio": timings["exact"].median_s / timings["padded"].median_s,
    }


def main() -> None:
    arguments = harness.parse_arguments(__doc__)
    harness.on_ranks("benchmarks.all_to_all_padding", RANKS)
    fr.init()
    repeats = 200 if arguments.quick else 600
    cases = [_measure(rows, at_once, repeats) for rows, at_once in itertools.product((1_000, 22_000), (1, 3, 10))]
    if collectives.rank() == 0:
        harness.report("one all-to-all: padded to buckets against exact sizes", cases, arguments)


if __name__ == "__main__":
    harness.run(main)
