"""Question: what does it save to remove duplicate ids at the source, at the owner, or at both?

    python -m benchmarks.table.dedup [--quick] [--json FILE]

Two ranks have one thread each (MTGRBoost, section 6, figure 16). All four variants run the same ops
on different inputs.
- "source" removes the duplicates of a batch before its ids travel. Without it every occurrence of an id travels, with a
  row and a gradient of its own.
- "owner" searches and reads the row of equal ids once. Without it the table searches and reads a row for every received
  id, as a look-ahead does. An update takes a row once, so it groups the equal rows first.
All rows exist before, because a look-ahead makes none; an update takes the number of the lookup that made them. A check
comes first: under SGD with exact sums all four must train the same rows. The timed rule is row-wise Adagrad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, processes, ranks
from benchmarks.harness.synthetic import ZipfIds
from benchmarks.table.work import ZIPF_ALPHA
from tf_fusedrec import ops, optimizers, tf
from tf_fusedrec.exchange import collectives, routing
from tf_fusedrec.exchange.topology import RankLayout, Topology
from tf_fusedrec.optimizers.rules import Rule
from tf_fusedrec.tables import NativeTable

RANKS = 2
DIMS = (16, 512)
IDS_PER_RANK = 20_480
VOCABULARY = 10**6
MODES = {"none": (False, False), "source": (True, False), "owner": (False, True), "both": (True, True)}
_BATCHES = 8
_NUMBER = 2**32  # a handle is lookup * _NUMBER + place; the handle of a look-ahead is the place alone
Step = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


def batch_of(rank: int, number: int) -> np.ndarray:
    """Returns the ids <int64>[N] of one batch of one rank."""
    return _ZIPF.draw(np.random.default_rng((number, rank)), (IDS_PER_RANK,))


_ZIPF = ZipfIds(VOCABULARY, ZIPF_ALPHA)


def make_step(table: NativeTable, name: str, *, at_source: bool, at_owner: bool, lookup: int = 0) -> Step:
    """Returns a step with one lookup and one update.

    Args:
      table: The table.
      name: Name of its exchanges.
      at_source, at_owner: Where duplicates are removed.
      lookup: Number of an earlier lookup, that a step without `at_owner` needs.

    Returns:
      step(ids [N], gradients [N, D]) -> rows [N, D], and <int64>[3]: ids sent by a rank, rows read by it, and the
      number of the lookup.
    """

    layout = RankLayout(Topology())  # one copy of the table over all ranks

    @tf.function(autograph=False)
    def step(ids: tf.Tensor, gradients: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        n = tf.size(ids, out_type=tf.int64)
        unique = ops.UniqueIds(ids, tf.stack([0, n]), tf.range(tf.size(ids)))
        if at_source:
            unique = ops.segment_unique(ids, unique.splits)
        outgoing = routing.Outgoing(name, unique, table.partition, len(table.names))
        route = routing.send_ids([outgoing], layout)[0]
        found = table.lookup(route.request) if at_owner else _lookup_of_each(table, route, lookup)
        rows = ops.recover(routing.return_rows(route, found.rows, layout, None), route.index)
        with tf.control_dependencies([rows]):  # no gradient exists before its row
            gradients = tf.identity(gradients)
        summed = ops.recover_grad(gradients, route.index, route.num_unique, pad=True)
        arrived = routing.send_gradients(route, [summed], layout, None)
        table.update([(found, arrived)], 1.0)
        read = tf.size(found.handles if at_owner else found.inverse, out_type=tf.int64)
        return rows, tf.stack([route.num_unique, read, tf.reduce_max(found.handles) // _NUMBER])

    return step


def _lookup_of_each(table: NativeTable, route: routing.Route, lookup: int) -> ops.TableRows:
    """Finds a row for every received id, however often the id is there."""
    found = table.look_ahead(route.request)
    handles, inverse = tf.unique(found.handles + lookup * _NUMBER)
    return ops.TableRows(found.rows, handles, inverse)


def _make_rows(table: NativeTable, name: str, batches: Sequence[tf.Tensor], dim: int) -> int:
    """Makes the rows of all ids, and returns the number of the last lookup. Gradients of zero change no row."""
    step = make_step(table, name, at_source=True, at_owner=True)
    numbers = [step(ids, tf.zeros([tf.size(ids), dim]))[1][2] for ids in batches]
    return int(numbers[-1])


def _table(name: str, dim: int, rule: Rule) -> NativeTable:
    return NativeTable(name, [fr.TableConfig(name="rows", dim=dim, optimizer=rule, initializer=fr.Zeros())], seed=0)


def _check(dim: int) -> None:
    """Checks that all four train the same rows under SGD, with gradients and a learning rate whose sums are exact."""
    rank = collectives.rank()
    gradients = tf.constant(np.random.default_rng(rank).integers(-8, 9, (IDS_PER_RANK, dim)).astype(np.float32) / 64)
    rows = {}
    for mode, (at_source, at_owner) in MODES.items():
        table = _table(f"check/{dim}/{mode}", dim, optimizers.SGD(0.25))
        batches = [tf.constant(batch_of(rank, number)) for number in range(3)]
        lookup = _make_rows(table, f"check.{dim}.{mode}.made", batches, dim)
        step = make_step(table, f"check.{dim}.{mode}", at_source=at_source, at_owner=at_owner, lookup=lookup)
        for ids in batches:
            rows[mode], _ = step(ids, gradients)
        harness.check_equal(f"rows of dedup {mode!r} after 2 steps against 'none'", rows[mode], rows["none"])
    if not np.any(rows["none"]):
        raise harness.CheckFailed("All rows are zero, so that their equality proves nothing.")


def _measure(dim: int, repeats: int) -> list[dict[str, Any]]:
    rank = collectives.rank()
    table = _table(f"dedup/{dim}", dim, optimizers.RowWiseAdagrad(0.05, variant="2d_sp"))
    batches = [tf.constant(batch_of(rank, number)) for number in range(_BATCHES)]
    lookup = _make_rows(table, f"dedup.{dim}.made", batches, dim)
    gradients = tf.constant(np.random.default_rng(rank).normal(size=(IDS_PER_RANK, dim)).astype(np.float32))
    counts: dict[str, list[np.ndarray]] = {mode: [] for mode in MODES}

    def step_of(mode: str) -> Callable[[int], None]:
        at_source, at_owner = MODES[mode]
        step = make_step(table, f"dedup.{dim}.{mode}", at_source=at_source, at_owner=at_owner, lookup=lookup)
        return lambda repeat: counts[mode].append(step(batches[repeat % _BATCHES], gradients)[1].numpy())

    steps = {mode: step_of(mode) for mode in MODES}
    ms = ranks.turns(steps, warmup=_BATCHES, repeats=repeats, inputs=lambda repeat: (repeat,)).ms
    records = []
    for mode in MODES:
        sent, read, _ = collectives.all_gather(np.array(counts[mode])).mean(axis=0)
        records.append({
            "dim": dim, "dedup": mode, "ids sent per rank": round(sent), "rows read per rank": round(read),
            "MB per all-to-all of rows": 4 * dim * sent / 1e6, "ms/step": ms[mode],
            "ids/s": 1e3 * RANKS * IDS_PER_RANK / ms[mode], "against none": ms["none"] / ms[mode],
        })  # fmt: skip
    return records


def on_rank(quick: bool) -> list[dict[str, Any]]:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.get_logger().setLevel("ERROR")  # TensorFlow warns of the eight functions that make_step traces
    fr.init()
    records = []
    for dim in DIMS:
        _check(dim)
        records += _measure(dim, repeats=16 if quick else 64)
    return records


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    records = processes.ask_ranks(on_rank, RANKS, quick=arguments.quick)
    title = f"dedup: {RANKS} ranks, {IDS_PER_RANK} ids per rank and step, zipf({ZIPF_ALPHA}) over {VOCABULARY} ids"
    harness.print_table(title, records)
    harness.write_json(arguments.json, {"benchmark": title, "cases": records})


if __name__ == "__main__":
    processes.program(main)
