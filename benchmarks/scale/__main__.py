"""Question: how good is the cost model of a step on 128 to 4,096 workers, in the cells that papers published?

    python -m benchmarks.scale [--quick] [--json FILE]

published.csv has the printed figures of five papers. A few of them fix the constants of the models here, which predict
the others. Both are printed beside the published figures, with the error of every cell and whether it was fitted.
Nothing is measured, so --quick changes nothing. Cells with the use "input" are what a paper states, such as the FLOPs
of a model. TABLE III of NestPipe prints two decimals, so its 0.26 is exact to 2 % only.

An all-to-all among N workers takes alpha * (N - 1) + volume * (N - 1) / N. The first part is a message to every other
worker, the second the bytes over the bandwidth. A lookup in a group of N workers takes a constant and a part that grows
with N. All workers ask the owner of the hottest rows. The papers print neither row bytes nor bandwidths, so that both
parts come from fitted cells. The steps are replayed by tf_fusedrec/schedules/planning/replay.py.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import harness, processes
from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules import DualBuffer, Nested, Pipelined, Schedule, Sync
from tf_fusedrec.schedules.planning.cluster import Cluster
from tf_fusedrec.schedules.planning.forecast import Workload
from tf_fusedrec.schedules.planning.measure import Lookup, Measured
from tf_fusedrec.schedules.planning.replay import Piece, StepCosts, step_s

PUBLISHED = pathlib.Path(__file__).with_name("published.csv")
NESTPIPE, TURBOGR, TWO_D = "NestPipe", "TurboGR", "2D-SP"
FIXED_LENGTH = 1024  # assumed: tokens of the model whose compute TABLE II gives
LOOKUP_STAGES = 4  # NestPipe IV.A: prefetch, copy to the device, routing, retrieval
Key = tuple[str, str, str, str]  # paper, table, row, column
# A figure, and whether its cell, or an equivalent one, fixed a constant of the model.
Prediction = tuple[Key, tuple[float, bool]]


@functools.cache
def published() -> dict[Key, tuple[float | None, bool]]:
    """Returns the figures of published.csv (None: out of memory), and whether the paper states them as inputs."""
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))[1:]
    return {
        (paper, table, row, column): (None if value == "out of memory" else float(value), use == "input")
        for paper, table, row, column, value, use in lines
    }


def value_of(paper: str, table: str, row: str, column: str) -> float:
    value, _ = published()[(paper, table, row, column)]
    assert value is not None, (paper, table, row, column)
    return value


def rows_of(paper: str, table: str) -> list[str]:
    return list(dict.fromkeys(key[2] for key in published() if key[:2] == (paper, table)))


def predicted(
    paper: str, table: str, row: str, figures: Mapping[str, float], fitted: Collection[str] = ()
) -> Iterator[Prediction]:
    """Yields the predictions of a row by column. `fitted` has the columns that fixed a constant."""
    return (((paper, table, row, column), (value, column in fitted)) for column, value in figures.items())


class Line(NamedTuple):
    constant: float
    slope: float

    @classmethod
    def through(cls, n: float, at_n: float, m: float, at_m: float) -> Line:
        slope = (at_m - at_n) / (m - n)
        return cls(at_n - slope * n, slope)

    def at(self, n: float) -> float:
        return self.constant + self.slope * n


class AllToAll(NamedTuple):
    """Seconds of one all-to-all among N workers."""

    alpha: float  # per message
    volume: float  # sent bytes of a worker / bandwidth

    @classmethod
    def through(cls, n: int, at_n: float, m: int, at_m: float) -> AllToAll:
        """Solves alpha (N - 1) + volume (N - 1) / N for two sizes. Division by N - 1 makes it a line in 1 / N."""
        return cls(*Line.through(1 / n, at_n / (n - 1), 1 / m, at_m / (m - 1)))

    def at(self, n: int) -> float:
        return (n - 1) * (self.alpha + self.volume / n)


@dataclasses.dataclass(frozen=True)
class PaperStep:
    """Costs of one step of one worker as papers state them, in seconds, without overlap."""

    lookup: float  # the stages before rows leave their owner: read, route, find, copy
    compute: float  # dense forward and backward
    exchange: float  # all-to-alls of rows and of gradients, of one size
    synchronize: float = 0.0  # exchange between replicas, of rows after the update or of gradients before it


class Replay(NamedTuple):
    """Times of a step in the steady state, in seconds."""

    step: float
    lookup_exposed: float  # time that lookups add to the compute
    exposed: float  # time that the network adds to both

    def ms(self, method: str) -> dict[str, float]:
        """Returns the columns of a method in NestPipe's TABLE II."""
        names = ("step ms", "lookup ms", "exposed ms")
        return {f"{method} {name}": 1e3 * seconds for name, seconds in zip(names, self)}


def replay(costs: PaperStep, schedule: Schedule) -> Replay:
    """Replays a step in equal micro-batches. A look-ahead has a resource for each stage of the lookups."""
    count = schedule.stages.pieces
    stages = LOOKUP_STAGES if schedule.stages.look_ahead else 1

    def seconds(network: float) -> float:
        one_way = network * costs.exchange / 2 / count
        pieces = (Piece(costs.compute / count, one_way, one_way),) * count
        average = network * costs.synchronize
        return step_s(StepCosts(0.0, 0.0, costs.lookup / stages, pieces, 0.0, average=average), schedule)

    step, without_network = seconds(1.0), seconds(0.0)
    return Replay(step, without_network - costs.compute, step - without_network)


class NestPipe:
    """1,536 NPUs, HSTU, 512 samples per worker (section VII). Fitted: TorchRec at 128 (Fig. 2) and 1,536 (TABLE II)."""

    SAMPLES = 512
    GROUPS = 4  # for 2D-SP, as stated
    # 154 of 1,186 ms are exposed, "13 %": 1/8 and the ends. The number of micro-batches is not stated.
    MICRO_BATCHES = 8
    METHODS = {"TorchRec": Sync(), "2D-SP": Sync(), "UniEmb": DualBuffer(), "NestPipe": Nested(MICRO_BATCHES)}
    WORKERS = (128, 256, 512, 1024, 1536)

    def __init__(self) -> None:
        columns = ("step ms", "lookup ms", "exposed ms")
        step, lookup, exchange = (1e-3 * value_of(NESTPIPE, "TABLE II", "1536 NPUs", f"TorchRec {x}") for x in columns)
        self.compute = step - lookup - exchange
        shares = [value_of(NESTPIPE, "Fig. 2", "128", f"TorchRec {x} %") / 100 for x in ("lookup", "communication")]
        step_128 = self.compute / (1 - sum(shares))
        self.lookup = Line.through(128, shares[0] * step_128, 1536, lookup)
        self.exchange = AllToAll.through(128, shares[1] * step_128, 1536, exchange)

    def costs(self, workers: int, groups: int = 1) -> PaperStep:
        # Lookups do not shrink with groups here: 2,767 of 2,871 ms stay under 2D-SP (TABLE II).
        return PaperStep(self.lookup.at(workers), self.compute, self.exchange.at(workers // groups))

    def run(self, method: str, workers: int) -> Replay:
        groups = self.GROUPS if "2D-SP" in method else 1
        return replay(self.costs(workers, groups), self.METHODS[method.removesuffix("+2D-SP")])

    def qps(self, method: str, workers: int) -> float:
        """Returns the throughput in 10^5 samples per second."""
        return workers * self.SAMPLES / self.run(method, workers).step / 1e5

    def predictions(self) -> Iterator[Prediction]:
        return (cell for part in (self._tables, self._gpus, self._figures, self._figure_10) for cell in part())

    def _tables(self) -> Iterator[Prediction]:
        """TABLES II (NPUs), III and IV, Figs. 2 and 8."""
        for workers in self.WORKERS:
            for method in self.METHODS:
                qps, alone = self.qps(method, workers), self.qps("TorchRec", workers)
                scaling = 100 * qps / self.qps(method, 128) / (workers / 128)
                figures = {"QPS 1e5": qps, "speedup": qps / alone, "scaling %": scaling}
                columns = {f"{method} {name}": figure for name, figure in figures.items()}
                yield from predicted(
                    NESTPIPE, "TABLE III", str(workers), columns, ["TorchRec QPS 1e5"] if workers == 1536 else []
                )
        for method in self.METHODS:
            columns = self.run(method, 1536).ms(method)
            fitted = [*self.run("TorchRec", 1536).ms("TorchRec"), "2D-SP lookup ms", "NestPipe exposed ms"]
            yield from predicted(NESTPIPE, "TABLE II", "1536 NPUs", columns, fitted)
        for method in ("2D-SP", "NestPipe", "NestPipe+2D-SP"):
            costs = self.costs(1536, self.GROUPS if "2D-SP" in method else 1)
            columns = {
                f"{method} communication ms": 1e3 * costs.exchange,
                f"{method} exposed ms": 1e3 * self.run(method, 1536).exposed,
                f"{method} QPS 1e5": self.qps(method, 1536),
            }
            fitted = ["NestPipe communication ms", "NestPipe exposed ms"]
            yield from predicted(NESTPIPE, "TABLE IV", "1536", columns, fitted)
        run = self.run("TorchRec", 128)
        parts = {"lookup": run.lookup_exposed, "communication": run.exposed}
        columns = {f"TorchRec {name} %": 100 * seconds / run.step for name, seconds in parts.items()}
        yield from predicted(NESTPIPE, "Fig. 2", "128", columns, columns)
        for workers in (128, 1536):
            columns = {f"{m} utilization %": 100 * self.compute / self.run(m, workers).step for m in self.METHODS}
            # Fig. 2 and TABLE II, from which the constants are, print the same for TorchRec.
            yield from predicted(NESTPIPE, "Fig. 8", str(workers), columns, ["TorchRec utilization %"])

    def _gpus(self) -> Iterator[Prediction]:
        """TABLE II, 128 GPUs. Its row of TorchRec fixes the costs; messages and bytes split as on the NPUs."""
        columns = ("step ms", "lookup ms", "exposed ms")
        step, lookup, exchange = (1e-3 * value_of(NESTPIPE, "TABLE II", "128 GPUs", f"TorchRec {x}") for x in columns)
        of_groups = self.exchange.at(128 // self.GROUPS) / self.exchange.at(128)
        for method, schedule in self.METHODS.items():
            share = of_groups if method == "2D-SP" else 1.0
            run = replay(PaperStep(lookup, step - lookup - exchange, share * exchange), schedule)
            fitted = run.ms("TorchRec")
            yield from predicted(NESTPIPE, "TABLE II", "128 GPUs", run.ms(method), fitted)

    def _figures(self) -> Iterator[Prediction]:
        """Fig. 9: micro-batches of 16 samples on 512 NPUs."""
        costs = self.costs(512)
        run = replay(costs, Nested(self.SAMPLES // 16))
        columns = {"communication ms": 1e3 * costs.exchange, "exposed %": 100 * run.exposed / costs.exchange}
        yield from predicted(NESTPIPE, "Fig. 9", "micro-batch 16", columns)
        yield from predicted(NESTPIPE, "Fig. 9", "micro-batch 16, clustered", {"exposed ms": 1e3 * run.exposed})

    def _figure_10(self) -> Iterator[Prediction]:
        """Fig. 10: 1,536 NPUs with the compute and the communication that section VII states."""
        whole = self.costs(1536)
        wide = 1e-3 * value_of(NESTPIPE, "Fig. 10", "8 layers", "communication ms")
        compute = {
            "2 layers": self.compute * 2 / 4, "8 layers": self.compute * 8 / 4,
            **{f"length {n}": self.compute * n / FIXED_LENGTH for n in (512, 2048)},
        }  # fmt: skip
        for row, seconds in compute.items():
            yield from predicted(NESTPIPE, "Fig. 10", row, {"compute ms": 1e3 * seconds})
        stated = {row: 1e-3 * value_of(NESTPIPE, "Fig. 10", row, "compute ms") for row in compute}
        exchanges = {"8 layers": wide, "2 layers": wide, "length 2048": whole.exchange, "dimension 1024": wide}
        for row, exchange in exchanges.items():
            costs = dataclasses.replace(whole, compute=stated.get(row, self.compute), exchange=exchange)
            exposed = replay(costs, Nested(self.MICRO_BATCHES)).exposed
            columns = {"exposed ms": 1e3 * exposed, "exposed %": 100 * exposed / exchange}
            yield from predicted(NESTPIPE, "Fig. 10", row, columns)


class TwoD:
    """ExFM and the CTR model of 2D-SP: 1.7 TB and 0.5 TB of tables on 256 to 4,096 GPUs (section 4).

    Fitted: the step by the size of a group (ExFM: Table 2, full parallelism at 256 and 1,024 GPUs; CTR: Table 1, 1 and
    2 groups); the bandwidth between replicas (Table 2, 1,024 GPUs in 4 groups), for CTR too; memory and imbalance of
    full parallelism, and the imbalance of 8 groups.
    """

    EXFM_BYTES, CTR_BYTES = 1.7e12, 0.5e12
    EXFM_BATCH, EXFM_BATCH_TABLE_1, CTR_BATCH = 1152, 896, 4096
    GROUP = 256  # GPUs per group in Table 2
    HBM_BYTES = 80e9  # assumed, since the paper does not state it
    LOOKUP_BYTES_PER_GPU = 15e9 / 1024  # Fig. 2: "almost 15GB" at 1K GPUs

    def __init__(self) -> None:
        full, grouped = (
            {n: n * self.EXFM_BATCH / value_of(TWO_D, "Table 2", f"{n} GPUs", f"{strategy} QPS") for n in (256, 1024)}
            for strategy in ("full", "2D")
        )
        self.exfm = Line.through(256, full[256], 1024, full[1024])
        self.replica_bytes_per_s = 2 * self.EXFM_BYTES * 3 / (1024 * (grouped[1024] - self.exfm.at(256)))
        ctr = {g: 256 * self.CTR_BATCH / value_of(TWO_D, "Table 1", f"{g} groups", "CTR QPS") for g in (1, 2)}
        self.ctr = Line.through(256, ctr[1], 128, ctr[2] - self._sync(self.CTR_BYTES, 2, 256))

    def _sync(self, table_bytes: float, groups: int, gpus: int) -> float:
        """Returns the seconds of a ring all-reduce of a worker's rows among its replicas (2D-SP, equation 1)."""
        return 2 * table_bytes * (groups - 1) / (gpus * self.replica_bytes_per_s)

    def predictions(self) -> Iterator[Prediction]:
        share = self.EXFM_BATCH_TABLE_1 / self.EXFM_BATCH  # of the work of a step
        exfm = Line(share * self.exfm.constant, share * self.exfm.slope)
        yield from self._table_1("CTR", 256, self.CTR_BATCH, self.CTR_BYTES, self.ctr)
        yield from self._table_1("ExFM", 1024, self.EXFM_BATCH_TABLE_1, self.EXFM_BYTES, exfm)
        yield from self._table_2()

    def _table_1(self, model: str, gpus: int, batch: int, table_bytes: float, line: Line) -> Iterator[Prediction]:
        def of(groups: int, column: str) -> float:
            return value_of(TWO_D, "Table 1", f"{groups} groups", f"{model} {column}")

        hottest = of(1, "imbalance") / gpus  # the busiest shard's part of all lookups
        peak = (of(1, "peak memory %") - of(1, "mean memory %")) / (of(1, "imbalance") - 1)
        for groups in (1, 2, 4, 8):
            step = line.at(gpus / groups) + self._sync(table_bytes, groups, gpus)
            imbalance = max(of(8, "imbalance"), hottest * gpus / groups)
            mean = of(1, "mean memory %") + 100 * table_bytes * (groups - 1) / gpus / self.HBM_BYTES
            columns = {
                f"{model} QPS": gpus * batch / step, f"{model} imbalance": imbalance, f"{model} mean memory %": mean,
                f"{model} peak memory %": mean + peak * (imbalance - 1),
            }  # fmt: skip
            fitted = {
                1: [*list(columns)[1:], "CTR QPS"], 2: ["CTR QPS"], 8: [f"{model} imbalance"]
            }.get(groups, [])  # fmt: skip
            yield from predicted(TWO_D, "Table 1", f"{groups} groups", columns, fitted)

    def _memory(self, group: int) -> float:
        """Returns the peak memory, in % of the device, of a worker in a group of `group` GPUs."""

        def varying(n: int) -> float:
            return 100 * (self.EXFM_BYTES / n + self.LOOKUP_BYTES_PER_GPU * n) / self.HBM_BYTES

        return value_of(TWO_D, "Table 2", "256 GPUs", "full memory %") - varying(256) + varying(group)

    def _table_2(self) -> Iterator[Prediction]:
        for gpus in (256, 512, 1024, 2048, 4096):
            for strategy, groups in (("full", 1), ("2D", gpus // self.GROUP)):
                step = self.exfm.at(gpus // groups) + self._sync(self.EXFM_BYTES, groups, gpus)
                columns = {
                    f"{strategy} memory %": self._memory(gpus // groups),
                    f"{strategy} QPS": gpus * self.EXFM_BATCH / step,
                    f"{strategy} scaling %": 100 * self.exfm.at(256) / step,
                }
                fitted = {256: list(columns), 1024: list(columns)[1:]}.get(gpus, [])
                yield from predicted(TWO_D, "Table 2", f"{gpus} GPUs", columns, fitted)


def turbogr() -> Iterator[Prediction]:
    """TurboGR, Table 4 on Ascend 910B1 nodes. Fitted: the baseline, and the all-to-alls of HSP (4 groups)."""
    columns = ("step ms", "all-to-all ms", "communication ms")
    step, whole, communication = (1e-3 * value_of(TURBOGR, "Table 4", "Baseline", column) for column in columns)
    # Neither the number of groups nor that of NPUs is stated.
    groups_of_hsp = round(whole / (1e-3 * value_of(TURBOGR, "Table 4", "HSP", "all-to-all ms")))
    for strategy, groups in (("Baseline", 1), ("HSP", groups_of_hsp)):
        all_to_all = whole / groups
        # Each other group sends a worker as many gradients as an all-to-all of its own group does. The rest is dense.
        synchronize = (groups - 1) * all_to_all / 2 + communication - whole
        run = replay(PaperStep(0.0, step - communication, all_to_all, synchronize), Sync())
        figures = {name: 1e3 * seconds for name, seconds in zip(columns, (run.step, all_to_all, run.exposed))}
        yield from predicted(TURBOGR, "Table 4", strategy, figures, columns if groups == 1 else columns[1:2])


def turbogr_models() -> Iterator[Prediction]:
    """TurboGR, Table 1. A step is compute plus an overhead, and exposed communication when there are more NPUs.

    Fitted: MFU of HSTU-large and HSTU-long (overhead and best MFU), scalability of HSTU-large (communication).
    """

    def of(model: str, column: str) -> float:
        return value_of(TURBOGR, "Table 1", model, column)

    large, long = "HSTU-large", "HSTU-long"
    flops = {model: of(model, "TFLOPs per step") for model in rows_of(TURBOGR, "Table 1")}
    # Seconds of a step are FLOPs / MFU, in units of the peak: a line in FLOPs.
    seconds = {model: flops[model] / (of(model, "MFU %") / 100) for model in (large, long)}
    step = Line.through(flops[large], seconds[large], flops[long], seconds[long])
    communication = flops[large] * (1 / of(large, "linear scalability") - 1)
    for model, work in flops.items():
        columns = {"MFU %": 100 * work / step.at(work), "linear scalability": work / (work + communication)}
        fitted = {large: list(columns), long: ["MFU %"]}.get(model, [])
        yield from predicted(TURBOGR, "Table 1", model, columns, fitted)


def turbogr_balance() -> Iterator[Prediction]:
    """TurboGR, Table 3. The row with fixed batches fixes the balanced step, and a delay in proportion to the tokens."""
    for data in rows_of(TURBOGR, "Table 3"):

        def of(column: str, data: str = data) -> float:
            return value_of(TURBOGR, "Table 3", data, column)

        step, delay = of("fixed step ms"), of("fixed delay ms")
        share = of("balanced difference of tokens") / of("fixed difference of tokens")
        for strategy, of_strategy in (("fixed", delay), ("balanced", delay * share)):
            whole = step - delay + of_strategy
            figures = {"step ms": whole, "delay ms": of_strategy, "delay %": 100 * of_strategy / whole}
            columns = {f"{strategy} {name}": figure for name, figure in figures.items()}
            yield from predicted(TURBOGR, "Table 3", data, columns, columns if strategy == "fixed" else ())


def turbogr_stages() -> Iterator[Prediction]:
    """TurboGR, Table 6, by our own Pipelined(6).

    Taken from the paper: compute and communication, and the part of dense all-reduces in Table 4's baseline.
    """
    whole, sparse = (value_of(TURBOGR, "Table 4", "Baseline", f"{name} ms") for name in ("communication", "all-to-all"))
    for model in rows_of(TURBOGR, "Table 6"):
        compute, exchange = (value_of(TURBOGR, "Table 6", model, f"{x} ms") for x in ("computing", "communication"))
        rows = exchange * sparse / whole / 2
        costs = StepCosts(0.0, 0.0, 0.0, (Piece(compute, rows, rows),), 0.0, dense=exchange - 2 * rows)
        step = step_s(costs, Pipelined(6))
        columns = {"not overlapped ms": step - compute, "computing %": 100 * compute / step}
        yield from predicted(TURBOGR, "Table 6", model, columns)


# Our own step: 128 users of 512 tokens with rows of 128 columns, and MTGRBoost's 4 GFLOP forward for a user.
USERS, TOKENS, DIM, FLOPS = 128, 512, 128, 4e9
DENSE_BYTES = 50_000_000  # assumed: about 12 million dense weights
VOCABULARY, ZIPF_ALPHA = 10**6, 0.8
MESSAGE_S = 5e-6  # assumed, since no paper states the cost of one message of an all-to-all


class Hardware(NamedTuple):
    """A worker as a paper states it. The rate of dense compute is assumed: 40 % of the data sheet's."""

    name: str
    per_host: int
    inside_bytes_per_s: float  # per worker
    between_bytes_per_s: float  # per host
    flops_per_s: float


A100 = Hardware("MTGRBoost: 8 A100 share 200 GB/s between nodes", 8, 600e9, 200e9, 0.4 * 156e12)
H20 = Hardware("FusedRec: 8 H20 of 400 Gb/s each", 8, 900e9, 8 * 400e9 / 8, 0.4 * 74e12)


def own_step_s(hardware: Hardware, workers: int, dim: int, flops: float) -> float:
    """Returns the seconds of our own step under sync: dense compute and exchanges, without work in tables.

    `flops` counts a user's forward pass. The ids are the expected number of distinct ones.
    """
    compute = 3 * USERS * flops / hardware.flops_per_s
    measured = Measured(
        samples=USERS, prepare=0.0, lookup=0.0, update=0.0, compute=compute, half_compute=compute / 2,
        dense_bytes=DENSE_BYTES,
    )  # fmt: skip
    cluster = Cluster(
        workers, 80e9, min(hardware.per_host, workers), hardware.inside_bytes_per_s, hardware.between_bytes_per_s,
        latency_s=MESSAGE_S,
    )  # fmt: skip
    weights = np.arange(1, VOCABULARY + 1, dtype=np.float64) ** -ZIPF_ALPHA
    ids = (round(float(-np.expm1(USERS * TOKENS * np.log1p(-weights / weights.sum())).sum())),)
    lookups = [Lookup(ids, ids, ids, 1, dim, 4, 8 * dim)]
    # Halves of a batch count for groups alone.
    forecast = Workload(measured, {1: lookups, 2: lookups}, 0.0).forecast(cluster, Topology(), Sync(), None)
    assert forecast is not None, "tables of no bytes fit"
    return forecast.step_s


def scaling() -> Iterator[Prediction]:
    """MTGRBoost, Fig. 17, and FusedRec, Fig. 6: our own step under sync, on the hardware that the papers state.

    Neither paper states its batch, its dense weights or what it overlaps: the constants above assume them. A dimension
    factor of 1 is taken as 64 columns.
    """

    def factor(hardware: Hardware, dim: int, flops: float) -> float:
        return own_step_s(hardware, 8, dim, flops) / own_step_s(hardware, 128, dim, flops)

    sizes = ((64, 4e9), (64, 110e9), (2 * 64, 4e9), (64 * 64, 4e9))
    factors = [100 * factor(A100, dim, flops) for dim, flops in sizes]
    columns = {"lowest scaling %": min(factors), "highest scaling %": max(factors)}
    yield from predicted("MTGRBoost", "Fig. 17", "128 GPUs", columns)
    columns = {"scaling factor": factor(H20, DIM, FLOPS)}
    yield from predicted("FusedRec", "Fig. 6", "128 GPUs", columns)


def compared() -> list[dict[str, Any]]:
    """Returns every published cell beside its prediction, with the error in % of the published figure.

    A cell "out of memory" has an error of 0 if the model predicts over 100 %.
    """
    of_functions = (turbogr, turbogr_models, turbogr_balance, turbogr_stages, scaling)
    generators = (NestPipe().predictions(), TwoD().predictions(), *(function() for function in of_functions))
    predictions = dict(itertools.chain.from_iterable(generators))
    records = []
    for key, (value, is_input) in published().items():
        if is_input:
            continue
        model, fitted = predictions[key]
        error = max(100 - model, 0.0) if value is None else 100 * (model / value - 1)
        records.append({
            **dict(zip(("paper", "table", "row", "column"), key)),
            "published": "out of memory" if value is None else value, "model": round(model, 6),
            "error %": round(error, 3), "kind": "fitted" if fitted else "predicted",
        })  # fmt: skip
    return records


def main() -> None:
    arguments = harness.parser(__doc__, "no effect").parse_args()
    cells = compared()
    for table in dict.fromkeys((cell["paper"], cell["table"]) for cell in cells):
        rows = [dict(list(cell.items())[2:]) for cell in cells if (cell["paper"], cell["table"]) == table]
        harness.print_table(" ".join(table), rows)
    errors = np.array([abs(cell["error %"]) for cell in cells if cell["kind"] == "predicted"])
    summary = {
        "cells_fitted": len(cells) - len(errors), "cells_predicted": len(errors),
        "median_error_predicted_percent": float(np.median(errors)),
        "p90_error_predicted_percent": float(np.percentile(errors, 90)),
    }  # fmt: skip
    harness.print_fields("errors of the predicted cells", summary)
    harness.write_json(arguments.json, {"cells": cells, **summary})


if __name__ == "__main__":
    processes.program(main)
