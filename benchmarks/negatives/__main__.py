"""Question: what do logits in segments cost and save, beside a gathered row for every negative?

    python -m benchmarks.negatives [--quick] [--json FILE]

A step computes loss and gradients of P positions, each with its own negatives from a table. The plain
form gathers a row for every negative, and automatic differentiation keeps this [P, n, D]. Our form looks up each item
once and computes logits in segments, and again in the gradient. A check comes
first: both forms must give the same loss and, in a smaller case, the same gradients. Peak memory is the memory that a
step adds, in a process of its own that returns freed memory to the system. For times the forms take turns.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from benchmarks.harness import harness, processes
from tf_fusedrec import losses, tf
from tf_fusedrec.losses.objectives import COLLISION_LOGIT

NEGATIVES = (32, 64, 128)
QUICK_NEGATIVES = (128,)
POSITIONS, QUICK_POSITIONS = 4096, 2048
PEAK_PROCESSES = 3
# In float32, logits up to 20 are rounded by 20 * 2**-24, and losses are means of thousands.
LOSS_TOLERANCE = 1e-5
DIM = 64
ITEMS = 200_000
TEMPERATURE = 0.05
# oneDNN's memory pool keeps far more memory than is in use. Without the pool, and with freed blocks returned to the
# system at once, the resident memory is the memory in use.
RETURN_MEMORY = {"TF_ENABLE_ONEDNN_OPTS": "0", "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}


class Case:
    """Positions of one batch, their positives and drawn negatives, and the table of their rows."""

    def __init__(self, positions: int, negatives: int, items: int = ITEMS):
        generator = np.random.default_rng(7)
        self.table = tf.Variable(generator.normal(size=(items, DIM)).astype(np.float32))
        self.query = tf.Variable(generator.normal(size=(positions, DIM)).astype(np.float32))
        self.positives = tf.constant(generator.integers(0, items, positions), tf.int64)
        self.negatives = tf.constant(generator.integers(0, items, (positions, negatives)), tf.int64)

    def plain(self) -> tf.Tensor:
        gathered = self.query, tf.gather(self.table, self.positives), tf.gather(self.table, self.negatives)
        query, positive, rows = (tf.math.l2_normalize(vectors, axis=-1) for vectors in gathered)
        own = tf.reduce_sum(query * positive, axis=-1, keepdims=True) / TEMPERATURE
        others = tf.einsum("pd,pnd->pn", query, rows) / TEMPERATURE
        others = tf.where(self.negatives == self.positives[:, tf.newaxis], COLLISION_LOGIT, others)
        first = tf.zeros_like(self.positives)  # the positive
        logits = tf.concat([own, others], axis=1)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(first, logits))

    def ours(self) -> tf.Tensor:
        items, chosen = tf.unique(tf.reshape(self.negatives, [-1]))
        rows, positive = tf.gather(self.table, items), tf.gather(self.table, self.positives)
        chosen = tf.reshape(chosen, tf.shape(self.negatives))
        nll = losses.sampled_softmax(self.query, positive, rows, self.positives, items, TEMPERATURE, chosen=chosen)
        return tf.reduce_mean(nll)

    def step(self, form: str) -> tf.types.experimental.GenericFunction:
        """Returns a function without arguments: loss, gradients of queries and of table rows (with repeated ids)."""
        loss_of = {"plain": self.plain, "ours": self.ours}[form]

        @tf.function(autograph=False)
        def run() -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = loss_of()
            d_query, d_table = tape.gradient(loss, [self.query, self.table])
            return [loss, d_query, d_table.values, d_table.indices]

        return run


def peak_bytes(form: str, positions: int, negatives: int) -> float:
    """Returns the bytes that the second step, forward and backward, adds at its peak. The first step traces.

    The process needs RETURN_MEMORY, or memory that the first step has freed counts as held before the second one.
    """
    step = Case(positions, negatives).step(form)
    step()
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the high-water mark begins here
    before = harness.kilobytes("VmRSS")
    step()
    return 1024.0 * (harness.kilobytes("VmHWM") - before)


def check_gradients() -> None:
    """Compares both forms' gradients of a small case in float64. The table's gradients are summed by row."""
    case = Case(positions=96, negatives=16, items=300)
    results = {form: case.step(form)() for form in ("plain", "ours")}
    dense = {}
    for form, (_, of_query, values, rows) in results.items():
        dense[form] = np.zeros([300, DIM])
        np.add.at(dense[form], rows.numpy(), values.numpy())
        dense[form] = np.concatenate([dense[form], of_query.numpy()])
    harness.check_close("gradients", dense["ours"], dense["plain"], relative=1e-4, reason="float32 sums in other order")


def measure(positions: int, negatives: int, repeats: int) -> dict[str, Any]:
    """Returns one record: losses, times, peaks, and the ratios of our form to the plain form."""
    case = Case(positions, negatives)
    steps = {form: case.step(form) for form in ("plain", "ours")}
    losses_of = {form: float(step()[0]) for form, step in steps.items()}
    harness.check_close(
        "loss", losses_of["ours"], losses_of["plain"], relative=LOSS_TOLERANCE, reason="float32 logits to 20"
    )
    times = harness.measure(steps, warmup=1, repeats=repeats)
    rows = int(np.unique(case.negatives).size)
    del case, steps
    peaks = {}
    for form in ("plain", "ours"):
        request = {"form": form, "positions": positions, "negatives": negatives}
        # The median over processes, because TensorFlow runs ops in varying orders.
        answers = [processes.ask(peak_bytes, variables=RETURN_MEMORY, **request) for _ in range(PEAK_PROCESSES)]
        peaks[form] = float(np.median(answers))
    return {
        "negatives": negatives, "positions": positions, "rows": rows, "dim": DIM,
        **{f"loss_{form}": loss for form, loss in losses_of.items()},
        **{f"ms_{form}": 1e3 * timing.median_s for form, timing in times.items()},
        "step_time_ratio": times["ours"].median_s / times["plain"].median_s,
        **{f"peak_bytes_{form}": peak for form, peak in peaks.items()},
        "peak_memory_ratio": peaks["ours"] / peaks["plain"],
    }  # fmt: skip


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    check_gradients()
    positions, repeats = (QUICK_POSITIONS, 5) if arguments.quick else (POSITIONS, 15)
    cases = [measure(positions, n, repeats) for n in (QUICK_NEGATIVES if arguments.quick else NEGATIVES)]
    last = cases[-1]
    harness.print_table(f"sampled negatives of {positions} positions out of {ITEMS} items", cases)
    figures = {name: last[name] for name in ("peak_memory_ratio", "step_time_ratio")}
    harness.write_json(arguments.json, {"benchmark": "negatives", **figures, "cases": cases})


if __name__ == "__main__":
    processes.program(main)
