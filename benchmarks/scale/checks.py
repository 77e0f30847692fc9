"""Checks of the cost model on cells of other clusters and models, with as few fitted constants as they allow.

Each function says what it takes from the paper. An error here is a limit of the model and stays in the output.
"""

from __future__ import annotations

import dataclasses

from benchmarks.scale import own
from benchmarks.scale.clusters import NestPipeCluster
from benchmarks.scale.fit import Key, Line, Prediction, printed, value_of
from benchmarks.scale.ops import OpCosts
from benchmarks.scale.published import (
    FUSEDREC,
    GPU_METHODS,
    MTGRBOOST,
    NESTPIPE,
    TABLE_1_MODELS,
    TABLE_3,
    TABLE_6,
    TURBOGR,
)
from benchmarks.scale.replay import PaperStep, nested, replay
from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules import Pipelined, Sync
from tf_fusedrec.schedules.planning.replay import Piece, StepCosts, step_s

NO_OPS = OpCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)  # no paper states the cost of its ops
FIXED_LENGTH = 1024  # assumed: tokens of the model whose compute TABLE II gives


def predictions() -> dict[Key, Prediction]:
    """Returns a prediction for every cell of the checks."""
    return {**_gpu_rows(), **_figs_8_to_10(), **_table_1(), **_table_3(), **_table_6(), **_scaling()}


def _gpu_rows() -> dict[Key, Prediction]:
    """TABLE II, GPUs. Its row of TorchRec fixes the costs; messages and bytes split as on the NPUs."""
    table, npus = printed(), NestPipeCluster()

    def of(method: str, column: str) -> float:
        return 1e-3 * value_of(table, NESTPIPE, "TABLE II", "128 GPUs", f"{method} {column}")

    lookup, exchange = of("TorchRec", "lookup ms"), of("TorchRec", "exposed ms")
    compute = of("TorchRec", "step ms") - lookup - exchange
    predicted: dict[Key, Prediction] = {}
    for method in GPU_METHODS:
        share = npus.all_to_all.at(128 // npus.GROUPS) / npus.all_to_all.at(128) if method == "2D-SP" else 1.0
        costs = PaperStep(lookup, compute, share * exchange / 2, share * exchange / 2)
        run = replay(costs, npus.METHODS[method])
        figures = {"step ms": run.step, "lookup ms": run.lookup_exposed, "exposed ms": run.exposed}
        for column, seconds in figures.items():
            key = (NESTPIPE, "TABLE II", "128 GPUs", f"{method} {column}")
            predicted[key] = Prediction(1e3 * seconds, method == "TorchRec")
    return predicted


def _figs_8_to_10() -> dict[Key, Prediction]:
    """Figs. 8 to 10. The fit of the NPUs, with the compute and communication that section VII states for Fig. 10."""
    table, npus = printed(), NestPipeCluster()

    def add(figure: str, row: str, column: str, value: float) -> None:
        predicted[(NESTPIPE, figure, row, column)] = Prediction(value, False)

    predicted: dict[Key, Prediction] = {}
    for workers in (128, 1536):
        for method in ("TorchRec", "2D-SP"):
            use = 100 * npus.compute / npus.run(method, workers).step
            fitted = method == "TorchRec"  # Fig. 2 and TABLE II, from which the constants are, print the same
            key = (NESTPIPE, "Fig. 8", str(workers), f"{method} utilization %")
            predicted[key] = Prediction(use, fitted)
    small = npus.costs(512)
    run = replay(small, nested(npus.SAMPLES // 16))
    together = small.rows + small.gradients
    add("Fig. 9", "micro-batch 16", "communication ms", 1e3 * together)
    add("Fig. 9", "micro-batch 16", "exposed %", 100 * run.exposed / together)
    add("Fig. 9", "micro-batch 16, clustered", "exposed ms", 1e3 * run.exposed)

    whole = npus.costs(1536)

    def exposed(compute: float, communication: float) -> float:
        costs = dataclasses.replace(whole, compute=compute, rows=communication / 2, gradients=communication / 2)
        return replay(costs, nested(npus.MICRO_BATCHES)).exposed

    def stated(row: str) -> float:
        return 1e-3 * value_of(table, NESTPIPE, "Fig. 10", row, "compute ms")

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


def _table_1() -> dict[Key, Prediction]:
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
    predicted: dict[Key, Prediction] = {}
    for model, work in flops.items():
        mfu = 100 * work / step.at(work)
        predicted[(TURBOGR, "Table 1", model, "MFU %")] = Prediction(mfu, model in (large, long))
        scaled = work / (work + communication)
        predicted[(TURBOGR, "Table 1", model, "linear scalability")] = Prediction(scaled, model == large)
    return predicted


def _table_3() -> dict[Key, Prediction]:
    """TurboGR, Table 3. The row with fixed batches fixes the balanced step, and a delay in proportion to the tokens."""
    predicted: dict[Key, Prediction] = {}
    for data, ((tokens, step, delay, _), (left, *_)) in TABLE_3.items():
        for strategy, of_strategy in (("fixed", delay), ("balanced", delay * left / tokens)):
            whole = step - delay + of_strategy
            figures = {"step ms": whole, "delay ms": of_strategy, "delay %": 100 * of_strategy / whole}
            for column, value in figures.items():
                predicted[(TURBOGR, "Table 3", data, f"{strategy} {column}")] = Prediction(value, strategy == "fixed")
    return predicted


def _table_6() -> dict[Key, Prediction]:
    """TurboGR, Table 6, by our own Pipelined(6).

    Taken from the paper: compute and communication, and the part of dense all-reduces in Table 4's baseline.
    """
    table = printed()
    whole, sparse = (
        value_of(table, TURBOGR, "Table 4", "Baseline", column) for column in ("communication ms", "all-to-all ms")
    )
    predicted: dict[Key, Prediction] = {}
    for model, (compute, communication, *_) in TABLE_6.items():
        rows = communication * sparse / whole / 2
        costs = StepCosts(0.0, 0.0, 0.0, (Piece(compute, rows, rows),), 0.0, dense=communication - 2 * rows)
        step = step_s(costs, Pipelined(6))
        predicted[(TURBOGR, "Table 6", model, "not overlapped ms")] = Prediction(step - compute, False)
        predicted[(TURBOGR, "Table 6", model, "computing %")] = Prediction(100 * compute / step, False)
    return predicted


def _scaling() -> dict[Key, Prediction]:
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
        (*row, "lowest scaling %"): Prediction(100 * min(models), False),
        (*row, "highest scaling %"): Prediction(100 * max(models), False),
        (FUSEDREC, "Fig. 6", "128 GPUs", "scaling factor"): Prediction(scaling(own.H20, own.DIM, own.FLOPS), False),
    }
