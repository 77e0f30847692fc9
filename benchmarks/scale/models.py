"""The cost models of benchmarks.scale: a few published cells fix their constants, and they predict the others.

An all-to-all among N workers takes alpha * (N - 1) + volume * (N - 1) / N. The first part is a message to every other
worker, the second the bytes over the bandwidth. A lookup in a group of N workers takes a constant and a part that grows
with N. All workers ask the owner of the hottest rows. The papers print neither row bytes nor bandwidths, so that both
parts come from fitted cells. The steps are replayed by tf_fusedrec/schedules/planning/replay.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from benchmarks.scale import own
from benchmarks.scale.published import (
    FUSEDREC,
    GPU_METHODS,
    MTGRBOOST,
    NESTPIPE,
    TABLE_1_MODELS,
    TABLE_3,
    TABLE_6,
    TURBOGR,
    TWO_D,
    WORKERS,
    Cell,
    cells,
)
from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules import DualBuffer, Nested, Pipelined, Schedule, Sync
from tf_fusedrec.schedules.planning.replay import Piece, StepCosts, step_s

Key = tuple[str, str, str, str]
NO_OPS = own.OpCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)  # no paper states the cost of its ops
FIXED_LENGTH = 1024  # assumed: tokens of the model whose compute TABLE II gives
LOOKUP_STAGES = 4  # NestPipe IV.A: prefetch, copy to the device, routing, retrieval


class Prediction(NamedTuple):
    value: float
    fitted: bool = False  # whether this cell, or an equivalent one, fixed a constant of the model


Table = dict[Key, Prediction]
PRINTED = {cell.key: cell.value for cell in cells()}


def value_of(*key: str) -> float:
    """Returns a figure that a paper prints, by paper, table, row and column."""
    value = PRINTED[(key[0], key[1], key[2], key[3])]
    assert value is not None, key
    return value


class Line(NamedTuple):
    """constant + slope * N, in seconds."""

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
    rows: float  # all-to-all
    gradients: float  # all-to-all
    synchronize: float = 0.0  # exchange between replicas, of rows after the update or of gradients before it


class Replay(NamedTuple):
    """Times of a step in the steady state, in seconds."""

    step: float
    lookup_exposed: float  # time that lookups add to the compute
    exposed: float  # time that the network adds to both


def replay(costs: PaperStep, schedule: Schedule) -> Replay:
    """Replays a step in equal micro-batches. A look-ahead has a resource for each stage of the lookups."""
    count = getattr(schedule, "micro_batches", 1)
    stages = LOOKUP_STAGES if isinstance(schedule, (DualBuffer, Nested)) else 1

    def seconds(network: float) -> float:
        piece = Piece(costs.compute / count, network * costs.rows / count, network * costs.gradients / count)
        average = network * costs.synchronize
        return step_s(StepCosts(0.0, 0.0, costs.lookup / stages, (piece,) * count, 0.0, average=average), schedule)

    step, without_network = seconds(1.0), seconds(0.0)
    return Replay(step, without_network - costs.compute, step - without_network)


class NestPipeCluster:
    """1,536 NPUs, HSTU, 512 samples per worker (section VII). Fitted: TorchRec at 128 (Fig. 2) and 1,536 (TABLE II)."""

    SAMPLES = 512
    GROUPS = 4  # for 2D-SP, as stated
    # 154 of 1,186 ms are exposed, "13 %": 1/8 and the ends. The number of micro-batches is not stated.
    MICRO_BATCHES = 8
    METHODS = {"TorchRec": Sync(), "2D-SP": Sync(), "UniEmb": DualBuffer(), "NestPipe": Nested(MICRO_BATCHES)}

    def __init__(self) -> None:
        columns = ("step ms", "lookup ms", "exposed ms")
        step, lookup, exchange = (1e-3 * value_of(NESTPIPE, "TABLE II", "1536 NPUs", f"TorchRec {x}") for x in columns)
        self.compute = step - lookup - exchange
        shares = [value_of(NESTPIPE, "Fig. 2", "128", f"TorchRec {x} %") / 100 for x in ("lookup", "communication")]
        step_128 = self.compute / (1 - sum(shares))
        self.lookup = Line.through(128, shares[0] * step_128, 1536, lookup)
        # Rows and gradients take two all-to-alls of one size.
        self.all_to_all = AllToAll.through(128, shares[1] * step_128 / 2, 1536, exchange / 2)

    def costs(self, workers: int, groups: int = 1) -> PaperStep:
        exchange = self.all_to_all.at(workers // groups)
        # Lookups do not shrink with groups here: 2,767 of 2,871 ms stay under 2D-SP (TABLE II).
        return PaperStep(self.lookup.at(workers), self.compute, exchange, exchange)

    def run(self, method: str, workers: int) -> Replay:
        groups = self.GROUPS if "2D-SP" in method else 1
        return replay(self.costs(workers, groups), self.METHODS[method.removesuffix("+2D-SP")])

    def qps(self, method: str, workers: int) -> float:
        """Returns the throughput in 10^5 samples per second."""
        return workers * self.SAMPLES / self.run(method, workers).step / 1e5

    def predictions(self) -> Table:
        table: Table = {}
        for method in self.METHODS:
            base = self.qps(method, 128)
            for workers in WORKERS:
                qps, row = self.qps(method, workers), (NESTPIPE, "TABLE III", str(workers))
                table[(*row, f"{method} QPS 1e5")] = Prediction(qps, (method, workers) == ("TorchRec", 1536))
                if method != "TorchRec":
                    table[(*row, f"{method} speedup")] = Prediction(qps / self.qps("TorchRec", workers))
                if workers > 128:
                    table[(*row, f"{method} scaling %")] = Prediction(100 * qps / base / (workers / 128))
            run = self.run(method, 1536)
            fits = {"2D-SP": "lookup ms", "NestPipe": "exposed ms"}
            for column, seconds in zip(("step ms", "lookup ms", "exposed ms"), (run.step, *run[1:])):
                fitted = method == "TorchRec" or fits.get(method) == column
                table[(NESTPIPE, "TABLE II", "1536 NPUs", f"{method} {column}")] = Prediction(1e3 * seconds, fitted)
        for method in ("2D-SP", "NestPipe", "NestPipe+2D-SP"):
            costs = self.costs(1536, self.GROUPS if "2D-SP" in method else 1)
            row, fitted = (NESTPIPE, "TABLE IV", "1536"), method == "NestPipe"
            both = 1e3 * (costs.rows + costs.gradients), 1e3 * self.run(method, 1536).exposed
            table[(*row, f"{method} communication ms")] = Prediction(both[0], fitted)
            table[(*row, f"{method} exposed ms")] = Prediction(both[1], fitted)
            table[(*row, f"{method} QPS 1e5")] = Prediction(self.qps(method, 1536))
        run = self.run("TorchRec", 128)
        for column, seconds in (("lookup %", run.lookup_exposed), ("communication %", run.exposed)):
            table[(NESTPIPE, "Fig. 2", "128", f"TorchRec {column}")] = Prediction(100 * seconds / run.step, True)
        return table


def turbogr() -> Table:
    """Ascend 910B1 nodes of TurboGR (Table 4). Fitted: the baseline, and the all-to-alls of HSP (4 groups)."""
    columns = ("step ms", "all-to-all ms", "communication ms")
    step, whole, communication = (1e-3 * value_of(TURBOGR, "Table 4", "Baseline", column) for column in columns)
    # Neither the number of groups nor that of NPUs is stated.
    groups_of_hsp = round(whole / (1e-3 * value_of(TURBOGR, "Table 4", "HSP", "all-to-all ms")))
    predicted: Table = {}
    for strategy, groups in (("Baseline", 1), ("HSP", groups_of_hsp)):
        all_to_all = whole / groups
        # Each other group sends a worker as many gradients as an all-to-all of its own group does. The rest is dense.
        synchronize = (groups - 1) * all_to_all / 2 + communication - whole
        run = replay(PaperStep(0.0, step - communication, all_to_all / 2, all_to_all / 2, synchronize), Sync())
        for column, seconds in zip(columns, (run.step, all_to_all, run.exposed)):
            fitted = strategy == "Baseline" or column == "all-to-all ms"
            predicted[(TURBOGR, "Table 4", strategy, column)] = Prediction(1e3 * seconds, fitted)
    return predicted


class TwoDCluster:
    """ExFM and the CTR model of 2D-SP: 1.7 TB and 0.5 TB of tables on 256 to 4,096 GPUs (section 4).

    Fitted figures:
    - the step by the size of a group (ExFM: Table 2, full parallelism at 256 and 1,024 GPUs; CTR: Table 1, 1 and 2
      groups);
    - the bandwidth between replicas (Table 2, 1,024 GPUs in 4 groups), for CTR too;
    - memory and imbalance of full parallelism, and the imbalance of 8 groups.
    """

    EXFM_BYTES, CTR_BYTES = 1.7e12, 0.5e12
    EXFM_BATCH, EXFM_BATCH_TABLE_1, CTR_BATCH = 1152, 896, 4096
    GROUP = 256  # GPUs per group in Table 2
    HBM_BYTES = 80e9  # assumed, since the paper does not state it
    LOOKUP_BYTES_PER_GPU = 15e9 / 1024  # Fig. 2: "almost 15GB" at 1K GPUs

    def __init__(self) -> None:
        full = {n: n * self.EXFM_BATCH / self._qps_2("full", n) for n in (256, 1024)}
        self.exfm = Line.through(256, full[256], 1024, full[1024])
        synchronize = 1024 * self.EXFM_BATCH / self._qps_2("2D", 1024) - self.exfm.at(256)
        self.replica_bytes_per_s = 2 * self.EXFM_BYTES * 3 / (1024 * synchronize)
        steps = {g: 256 * self.CTR_BATCH / self._qps_1("CTR", g) for g in (1, 2)}
        self.ctr = Line.through(256, steps[1], 128, steps[2] - self._sync(self.CTR_BYTES, 2, 256))

    def _qps_1(self, model: str, groups: int) -> float:
        return value_of(TWO_D, "Table 1", f"{groups} groups", f"{model} QPS")

    def _qps_2(self, strategy: str, gpus: int) -> float:
        return value_of(TWO_D, "Table 2", f"{gpus} GPUs", f"{strategy} QPS")

    def _sync(self, table_bytes: float, groups: int, gpus: int) -> float:
        """Returns the seconds of a ring all-reduce of a worker's rows among its replicas (2D-SP, equation 1)."""
        return 2 * table_bytes * (groups - 1) / (gpus * self.replica_bytes_per_s)

    def predictions(self) -> Table:
        return {**self._table_1(), **self._table_2()}

    def _table_1(self) -> Table:
        predicted: Table = {}
        share = self.EXFM_BATCH_TABLE_1 / self.EXFM_BATCH  # of the work of a step
        models = {
            "CTR": (256, self.CTR_BATCH, self.CTR_BYTES, self.ctr),
            "ExFM": (
                1024,
                self.EXFM_BATCH_TABLE_1,
                self.EXFM_BYTES,
                Line(share * self.exfm.constant, share * self.exfm.slope),
            ),
        }
        for model, (gpus, batch, table_bytes, line) in models.items():

            def of(groups: int, column: str, model: str = model) -> float:
                return value_of(TWO_D, "Table 1", f"{groups} groups", f"{model} {column}")

            hottest = of(1, "imbalance") / gpus  # the busiest shard's part of all lookups
            peak = (of(1, "peak memory %") - of(1, "mean memory %")) / (of(1, "imbalance") - 1)
            for groups in (1, 2, 4, 8):
                step = line.at(gpus / groups) + self._sync(table_bytes, groups, gpus)
                imbalance = max(of(8, "imbalance"), hottest * gpus / groups)
                replicas = 100 * table_bytes * (groups - 1) / gpus / self.HBM_BYTES
                mean = of(1, "mean memory %") + replicas
                row = (TWO_D, "Table 1", f"{groups} groups")
                fitted = groups in (1, 2) and model == "CTR"
                predicted[(*row, f"{model} QPS")] = Prediction(gpus * batch / step, fitted)
                predicted[(*row, f"{model} imbalance")] = Prediction(imbalance, groups in (1, 8))
                predicted[(*row, f"{model} mean memory %")] = Prediction(mean, groups == 1)
                predicted[(*row, f"{model} peak memory %")] = Prediction(mean + peak * (imbalance - 1), groups == 1)
        return predicted

    def _memory(self, group: int) -> float:
        """Returns the peak memory, in % of the device, of a worker in a group of `group` GPUs."""

        def varying(n: int) -> float:
            return 100 * (self.EXFM_BYTES / n + self.LOOKUP_BYTES_PER_GPU * n) / self.HBM_BYTES

        rest = value_of(TWO_D, "Table 2", "256 GPUs", "full memory %") - varying(256)
        return rest + varying(group)

    def _table_2(self) -> Table:
        predicted: Table = {}
        for strategy, sizes in (("full", (256, 512, 1024, 2048, 4096)), ("2D", (256, 512, 1024, 2048, 4096))):
            for gpus in sizes:
                groups = gpus // self.GROUP if strategy == "2D" else 1
                step = self.exfm.at(gpus // groups) + self._sync(self.EXFM_BYTES, groups, gpus)
                row = (TWO_D, "Table 2", f"{gpus} GPUs")
                fits = (256, 1024)
                predicted[(*row, f"{strategy} memory %")] = Prediction(self._memory(gpus // groups), gpus == 256)
                predicted[(*row, f"{strategy} QPS")] = Prediction(gpus * self.EXFM_BATCH / step, gpus in fits)
                scaling = 100 * self.exfm.at(256) / step
                predicted[(*row, f"{strategy} scaling %")] = Prediction(scaling, gpus in fits)
        return predicted


def checks() -> Table:
    """Returns a prediction for the cells of other clusters and models, with as few fitted constants as they allow.

    Each function says what it takes from the paper. An error here is a limit of the model and stays in the output.
    """
    return {**_gpu_rows(), **_figs_8_to_10(), **_table_1(), **_table_3(), **_table_6(), **_scaling()}


def _gpu_rows() -> Table:
    """TABLE II, GPUs. Its row of TorchRec fixes the costs; messages and bytes split as on the NPUs."""
    npus = NestPipeCluster()

    def of(method: str, column: str) -> float:
        return 1e-3 * value_of(NESTPIPE, "TABLE II", "128 GPUs", f"{method} {column}")

    lookup, exchange = of("TorchRec", "lookup ms"), of("TorchRec", "exposed ms")
    compute = of("TorchRec", "step ms") - lookup - exchange
    predicted: Table = {}
    for method in GPU_METHODS:
        share = npus.all_to_all.at(128 // npus.GROUPS) / npus.all_to_all.at(128) if method == "2D-SP" else 1.0
        costs = PaperStep(lookup, compute, share * exchange / 2, share * exchange / 2)
        run = replay(costs, npus.METHODS[method])
        figures = {"step ms": run.step, "lookup ms": run.lookup_exposed, "exposed ms": run.exposed}
        for column, seconds in figures.items():
            key = (NESTPIPE, "TABLE II", "128 GPUs", f"{method} {column}")
            predicted[key] = Prediction(1e3 * seconds, method == "TorchRec")
    return predicted


def _figs_8_to_10() -> Table:
    """Figs. 8 to 10. The fit of the NPUs, with the compute and communication that section VII states for Fig. 10."""
    npus = NestPipeCluster()

    def add(figure: str, row: str, column: str, value: float) -> None:
        predicted[(NESTPIPE, figure, row, column)] = Prediction(value)

    predicted: Table = {}
    for workers in (128, 1536):
        for method in ("TorchRec", "2D-SP"):
            use = 100 * npus.compute / npus.run(method, workers).step
            fitted = method == "TorchRec"  # Fig. 2 and TABLE II, from which the constants are, print the same
            key = (NESTPIPE, "Fig. 8", str(workers), f"{method} utilization %")
            predicted[key] = Prediction(use, fitted)
    small = npus.costs(512)
    run = replay(small, Nested(npus.SAMPLES // 16))
    together = small.rows + small.gradients
    add("Fig. 9", "micro-batch 16", "communication ms", 1e3 * together)
    add("Fig. 9", "micro-batch 16", "exposed %", 100 * run.exposed / together)
    add("Fig. 9", "micro-batch 16, clustered", "exposed ms", 1e3 * run.exposed)

    whole = npus.costs(1536)

    def exposed(compute: float, communication: float) -> float:
        costs = dataclasses.replace(whole, compute=compute, rows=communication / 2, gradients=communication / 2)
        return replay(costs, Nested(npus.MICRO_BATCHES)).exposed

    def stated(row: str) -> float:
        return 1e-3 * value_of(NESTPIPE, "Fig. 10", row, "compute ms")

    communication = 1.1698  # "the communication time of 1,169.8ms", with 8 layers
    add("Fig. 10", "dimension 1024", "exposed %", 100 * exposed(npus.compute, communication) / communication)
    add("Fig. 10", "8 layers", "compute ms", 1e3 * npus.compute * 8 / 4)
    add("Fig. 10", "8 layers", "exposed ms", 1e3 * exposed(stated("8 layers"), communication))
    add("Fig. 10", "2 layers", "compute ms", 1e3 * npus.compute * 2 / 4)
    add("Fig. 10", "2 layers", "exposed %", 100 * exposed(stated("2 layers"), communication) / communication)
    for length in (512, 2048):
        add("Fig. 10", f"length {length}", "compute ms", 1e3 * npus.compute * length / FIXED_LENGTH)
    communication = whole.rows + whole.gradients
    add("Fig. 10", "length 2048", "exposed ms", 1e3 * exposed(stated("length 2048"), communication))
    return predicted


def _table_1() -> Table:
    """TurboGR, Table 1. A step is compute plus an overhead, and exposed communication when there are more NPUs.

    Fitted: MFU of HSTU-large and HSTU-long (overhead and best MFU), scalability of HSTU-large (communication).
    """
    flops = {model: stated[0] for model, stated in TABLE_1_MODELS.items()}
    large, long = "HSTU-large", "HSTU-long"
    # Seconds of a step are FLOPs / MFU, in units of the peak: a line in FLOPs.
    seconds = {model: flops[model] / (TABLE_1_MODELS[model][1] / 100) for model in (large, long)}
    step = Line.through(flops[large], seconds[large], flops[long], seconds[long])
    scalability = TABLE_1_MODELS[large][2]
    communication = flops[large] * (1 / scalability - 1)
    predicted: Table = {}
    for model, work in flops.items():
        mfu = 100 * work / step.at(work)
        predicted[(TURBOGR, "Table 1", model, "MFU %")] = Prediction(mfu, model in (large, long))
        scaled = work / (work + communication)
        predicted[(TURBOGR, "Table 1", model, "linear scalability")] = Prediction(scaled, model == large)
    return predicted


def _table_3() -> Table:
    """TurboGR, Table 3. The row with fixed batches fixes the balanced step, and a delay in proportion to the tokens."""
    predicted: Table = {}
    for data, ((tokens, step, delay, _), (left, *_)) in TABLE_3.items():
        for strategy, of_strategy in (("fixed", delay), ("balanced", delay * left / tokens)):
            whole = step - delay + of_strategy
            figures = {"step ms": whole, "delay ms": of_strategy, "delay %": 100 * of_strategy / whole}
            for column, value in figures.items():
                predicted[(TURBOGR, "Table 3", data, f"{strategy} {column}")] = Prediction(value, strategy == "fixed")
    return predicted


def _table_6() -> Table:
    """TurboGR, Table 6, by our own Pipelined(6).

    Taken from the paper: compute and communication, and the part of dense all-reduces in Table 4's baseline.
    """
    whole, sparse = (
        value_of(TURBOGR, "Table 4", "Baseline", column) for column in ("communication ms", "all-to-all ms")
    )
    predicted: Table = {}
    for model, (compute, communication, *_) in TABLE_6.items():
        rows = communication * sparse / whole / 2
        costs = StepCosts(0.0, 0.0, 0.0, (Piece(compute, rows, rows),), 0.0, dense=communication - 2 * rows)
        step = step_s(costs, Pipelined(6))
        predicted[(TURBOGR, "Table 6", model, "not overlapped ms")] = Prediction(step - compute)
        predicted[(TURBOGR, "Table 6", model, "computing %")] = Prediction(100 * compute / step)
    return predicted


def _scaling() -> Table:
    """MTGRBoost, Fig. 17, and FusedRec, Fig. 6: our own step under sync, on the hardware that the papers state.

    Neither paper states its batch, its dense weights or what it overlaps: own.py assumes them. A dimension factor of 1
    is taken as 64 columns.
    """

    def scaling(hardware: own.Hardware, dim: int, flops: float) -> float:
        work = own.workload(NO_OPS, hardware.flops_per_s, imbalance=1.0, dim=dim, flops=flops)
        few, many = (own.step_seconds(work, hardware, workers, Topology(), Sync()) for workers in (8, 128))
        return few / many

    models = [scaling(own.A100, dim, flops) for dim, flops in ((64, 4e9), (64, 110e9), (2 * 64, 4e9), (64 * 64, 4e9))]
    row = (MTGRBOOST, "Fig. 17", "128 GPUs")
    return {
        (*row, "lowest scaling %"): Prediction(100 * min(models)),
        (*row, "highest scaling %"): Prediction(100 * max(models)),
        (FUSEDREC, "Fig. 6", "128 GPUs", "scaling factor"): Prediction(scaling(own.H20, own.DIM, own.FLOPS)),
    }


def predictions() -> Table:
    """Returns a prediction for every published cell."""
    return NestPipeCluster().predictions() | TwoDCluster().predictions() | turbogr() | checks()


def compared(cell: Cell, prediction: Prediction) -> dict[str, Any]:
    """Returns a cell beside its prediction. "out of memory" has an `error %` of 0 if the model predicts over 100 %."""
    if cell.value is None:
        error = 0.0 if prediction.value > 100 else 100 - prediction.value
    else:
        error = 100 * (prediction.value / cell.value - 1)
    return {
        "paper": cell.paper, "table": cell.table, "row": cell.row, "column": cell.column,
        "published": "out of memory" if cell.value is None else cell.value, "model": round(prediction.value, 6),
        "error %": round(error, 3), "kind": "fitted" if prediction.fitted else "predicted",
    }  # fmt: skip
