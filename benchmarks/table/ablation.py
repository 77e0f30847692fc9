"""Question: what do removed duplicates and shared exchanges save, separately and together?

    python -m benchmarks.table.ablation [--quick] [--json FILE]

Two ranks with one thread each answer both parts. benchmarks/results/table_ablation.txt is the printed page.

`dedup` (MTGRBoost, section 6, figure 16): all four variants run the same ops on different inputs.
- "source" removes the duplicates of a batch before its ids travel. Without it every occurrence of an id travels, with a
  row and a gradient of its own.
- "owner" searches and reads the row of equal ids once. Without it the table searches and reads a row for every received
  id, as a look-ahead does. An update takes a row once, so it groups the equal rows first.
All rows exist before, because a look-ahead makes none; an update takes the number of the lookup that made them. A check
comes first: under SGD with exact sums all four must train the same rows. The timed rule is row-wise Adagrad.

`dimensions` (FusedRec, figure 7): tables of a dimension share an exchange, or have one each. A record has the number of
all-to-alls in a training step, and size and rate of the row exchanges. The sizes belong to real batches without
duplicates, a rank's own share included. The all-to-alls of a dimension run in one call, as inside a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, processes, ranks
from benchmarks.harness.harness import Batches, ZipfIds
from benchmarks.table.work import ZIPF_ALPHA
from tf_fusedrec import ops, optimizers, tf
from tf_fusedrec.exchange import collectives, routing
from tf_fusedrec.exchange.topology import RankLayout, Topology
from tf_fusedrec.optimizers.rules import Rule
from tf_fusedrec.tables import NativeTable

RANKS = 2
_BATCHES = 8
DEDUP_DIMS = (16, 512)
IDS_PER_RANK = 20_480
VOCABULARY = 10**6
MODES = {"none": (False, False), "source": (True, False), "owner": (False, True), "both": (True, True)}
_NUMBER = 2**32  # a handle is lookup * _NUMBER + place; the handle of a look-ahead is the place alone
Step = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


def batch_of(rank: int, number: int) -> np.ndarray:
    return _ZIPF.draw(np.random.default_rng((number, rank)), (IDS_PER_RANK,))


_ZIPF = ZipfIds(VOCABULARY, ZIPF_ALPHA)


def make_step(table: NativeTable, name: str, *, at_source: bool, at_owner: bool, lookup: int = 0) -> Step:
    """Returns a step with one lookup and one update, which removes duplicates `at_source` and `at_owner`.

    step(ids [N], gradients [N, D]) returns rows [N, D], and <int64>[3]: ids sent by a rank, rows read by it, and the
    number of the lookup. `lookup` is the number of an earlier one, which a step without `at_owner` needs.
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
        (returned,) = routing.exchange([routing.outgoing_rows(route, found.rows, None)], layout)
        rows = ops.recover(returned, route.index)
        with tf.control_dependencies([rows]):  # no gradient exists before its row
            gradients = tf.identity(gradients)
        summed = ops.recover_grad(gradients, route.index, route.num_unique, pad=True)
        (arrived,) = routing.exchange([routing.outgoing_gradients(route, [summed], None)], layout)
        table.update([(found, arrived, None)], 1.0)
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


def check_dedup(dim: int) -> None:
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


def measure_dedup(dim: int, repeats: int) -> list[dict[str, Any]]:
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


DIMS = (4, 16, 64, 256)
FEATURES = 8  # per dimension
BATCH_SIZE = 512
IDS_PER_FEATURE = 4
_PER_EXCHANGE = 3  # all-to-alls of a training step: ids, rows, gradients


def sent_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of distinct ids for each owner, <int32>[R] over all segments and <int32>[S, R] by segment.

    A segment is a row of ids <int64>[S, n].
    """
    bounds = np.arange(len(ids) + 1) * ids.shape[1]
    unique = ops.segment_unique(tf.constant(ids.ravel()), tf.constant(bounds, tf.int64))
    splits = unique.splits.numpy()
    alone = []
    for begin, end in zip(splits[:-1], splits[1:]):
        ranked = ops.rank_partition(
            unique.ids[begin:end], tf.constant([0, end - begin], tf.int64), num_ranks=RANKS, owner="hash_range",
            id_bits=64, segment_names=["segment"],
        )  # fmt: skip
        alone.append(ranked.id_splits.numpy())
    return np.sum(alone, axis=0, dtype=np.int32), np.stack(alone)


def _exchange(name: str, dim: int, count: int) -> tf.types.experimental.PolymorphicFunction:
    """Returns a function with `count` all-to-alls of rows [P, dim] in one call."""
    signature = [[tf.TensorSpec([None, dim], tf.float32)] * count, tf.TensorSpec([count, RANKS], tf.int32)]

    @tf.function(input_signature=signature, autograph=False)
    def exchange(rows: Sequence[tf.Tensor], splits: tf.Tensor) -> list[tf.Tensor]:
        sent = [collectives.all_to_all(part, splits[n], name=f"{name}.{n}") for n, part in enumerate(rows)]
        return [received for received, _ in sent]

    return exchange


def _buffers(splits: np.ndarray, dim: int) -> list[tf.Tensor]:
    """Returns a padded buffer of rows for each line of splits [C, R]. Every row names its sender."""
    buffers = []
    for n in splits.sum(axis=1).tolist():
        rows = tf.fill([n, dim], float(collectives.rank() + 1))
        buffers.append(ops.recover(rows, tf.range(n), pad=True))
    return buffers


def check_senders(received: Sequence[tf.Tensor], splits: np.ndarray) -> None:
    """Checks that this rank received its rows from every rank."""
    by_rank = collectives.all_gather(splits[np.newaxis])  # [R, C, R]
    for n, rows in enumerate(received):
        senders = np.repeat(np.arange(RANKS) + 1.0, by_rank[:, n, collectives.rank()])
        harness.check_equal(f"senders of the rows of all-to-all {n}", rows[:, 0], senders)


def measure_dimension(dim: int, batches: Batches, repeats: int) -> dict[str, Any]:
    exchanges = {"fused": _exchange(f"fused.{dim}", dim, 1), "apart": _exchange(f"apart.{dim}", dim, FEATURES)}
    work: dict[str, list[Any]] = {name: [] for name in exchanges}
    for number in range(_BATCHES):
        together, alone = sent_ids(batches.batch(number, collectives.rank()).ids.reshape(FEATURES, -1))
        for name, splits in (("fused", together[np.newaxis]), ("apart", alone)):
            buffers, counts = _buffers(splits, dim), tf.constant(splits)
            check_senders(exchanges[name](buffers, counts), splits)
            work[name].append((buffers, counts))

    def call(name: str, repeat: int) -> Any:
        return exchanges[name](*work[name][repeat % _BATCHES])

    calls = {name: functools.partial(call, name) for name in exchanges}
    ms = ranks.turns(calls, warmup=_BATCHES, repeats=repeats, inputs=lambda repeat: (repeat,)).ms
    rows = float(np.mean([tf.reduce_sum(counts) for _, counts in work["fused"]]))
    bytes_sent = 4 * dim * float(collectives.all_gather(np.array([rows])).mean())
    return {
        "dim": dim, "tables": FEATURES, "all-to-alls fused": _PER_EXCHANGE,
        "all-to-alls apart": _PER_EXCHANGE * FEATURES, "KB per all-to-all of rows, fused": bytes_sent / 1e3,
        "KB apart": bytes_sent / FEATURES / 1e3, "ms fused": ms["fused"], "ms apart": ms["apart"],
        "MB/s fused": bytes_sent / 1e3 / ms["fused"], "MB/s apart": bytes_sent / 1e3 / ms["apart"],
        "ratio": ms["apart"] / ms["fused"],
    }  # fmt: skip


def on_rank(quick: bool) -> dict[str, list[dict[str, Any]]]:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.get_logger().setLevel("ERROR")  # TensorFlow warns of the eight functions that make_step traces
    fr.init()
    found: dict[str, list[dict[str, Any]]] = {"dedup": []}
    for dim in DEDUP_DIMS:
        check_dedup(dim)
        found["dedup"] += measure_dedup(dim, repeats=16 if quick else 64)
    batches = Batches(features=FEATURES, batch_size=BATCH_SIZE, ids_per_feature=IDS_PER_FEATURE, alpha=ZIPF_ALPHA)
    return found | {"dimensions": [measure_dimension(dim, batches, repeats=48 if quick else 192) for dim in DIMS]}


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    found = processes.ask_ranks(on_rank, RANKS, quick=arguments.quick)
    print(f"on: {harness.describe_machine()}; {RANKS} ranks, zipf({ZIPF_ALPHA})")
    for name, records in found.items():
        harness.print_table(name, records)
    harness.write_json(arguments.json, {"benchmark": "table.ablation", **found})


if __name__ == "__main__":
    processes.program(main)
