"""The clusters of NestPipe and TurboGR as cost models (fit.py)."""

from __future__ import annotations

from typing import Any

from benchmarks.scale.fit import AllToAll, Key, Line, Prediction, printed, value_of
from benchmarks.scale.published import NESTPIPE, TURBOGR, WORKERS, Cell
from benchmarks.scale.replay import PaperStep, Replay, dual_buffer, nested, replay, sync


class NestPipeCluster:
    """1,536 NPUs, HSTU, 512 samples per worker (section VII). Fitted: TorchRec at 128 (Fig. 2) and 1,536 (TABLE II)."""

    SAMPLES = 512
    GROUPS = 4  # for 2D-SP, as stated
    # 154 of 1,186 ms are exposed, "13 %": 1/8 and the ends. The number of micro-batches is not stated.
    MICRO_BATCHES = 8
    METHODS = {"TorchRec": sync, "2D-SP": sync, "UniEmb": dual_buffer, "NestPipe": nested(MICRO_BATCHES)}

    def __init__(self) -> None:
        table = printed()
        step, lookup, exchange = (
            1e-3 * value_of(table, NESTPIPE, "TABLE II", "1536 NPUs", f"TorchRec {column}")
            for column in ("step ms", "lookup ms", "exposed ms")
        )
        self.compute = step - lookup - exchange
        shares = [
            value_of(table, NESTPIPE, "Fig. 2", "128", f"TorchRec {column}") / 100
            for column in ("lookup %", "communication %")
        ]
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

    def predictions(self) -> dict[Key, Prediction]:
        table: dict[Key, Prediction] = {}
        for method in self.METHODS:
            base = self.qps(method, 128)
            for workers in WORKERS:
                qps = self.qps(method, workers)
                row = (NESTPIPE, "TABLE III", str(workers))
                table[(*row, f"{method} QPS 1e5")] = Prediction(qps, (method, workers) == ("TorchRec", 1536))
                if method != "TorchRec":
                    table[(*row, f"{method} speedup")] = Prediction(qps / self.qps("TorchRec", workers), False)
                if workers > 128:
                    table[(*row, f"{method} scaling %")] = Prediction(100 * qps / base / (workers / 128), False)
            run = self.run(method, 1536)
            for column, seconds in zip(
                ("step ms", "lookup ms", "exposed ms"), (run.step, run.lookup_exposed, run.exposed)
            ):
                fitted = method == "TorchRec" or (method, column) in (
                    ("2D-SP", "lookup ms"),
                    ("NestPipe", "exposed ms"),
                )
                table[(NESTPIPE, "TABLE II", "1536 NPUs", f"{method} {column}")] = Prediction(1e3 * seconds, fitted)
        for method in ("2D-SP", "NestPipe", "NestPipe+2D-SP"):
            costs = self.costs(1536, self.GROUPS if "2D-SP" in method else 1)
            figures = {
                "communication ms": 1e3 * (costs.rows + costs.gradients),
                "exposed ms": 1e3 * self.run(method, 1536).exposed,
                "QPS 1e5": self.qps(method, 1536),
            }
            for column, value in figures.items():
                fitted = method == "NestPipe" and column != "QPS 1e5"
                table[(NESTPIPE, "TABLE IV", "1536", f"{method} {column}")] = Prediction(value, fitted)
        run = self.run("TorchRec", 128)
        for column, seconds in (("lookup %", run.lookup_exposed), ("communication %", run.exposed)):
            table[(NESTPIPE, "Fig. 2", "128", f"TorchRec {column}")] = Prediction(100 * seconds / run.step, True)
        return table


class TurboGRCluster:
    """Ascend 910B1 nodes of TurboGR (Table 4). Fitted: the baseline, and the all-to-alls of HSP (4 groups)."""

    def __init__(self) -> None:
        table = printed()
        step, self.all_to_all, communication = (
            1e-3 * value_of(table, TURBOGR, "Table 4", "Baseline", column)
            for column in ("step ms", "all-to-all ms", "communication ms")
        )
        self.compute = step - communication
        self.other = communication - self.all_to_all  # dense all-reduces
        grouped = 1e-3 * value_of(table, TURBOGR, "Table 4", "HSP", "all-to-all ms")
        self.groups = round(self.all_to_all / grouped)  # stated neither, nor is the number of NPUs

    def predictions(self) -> dict[Key, Prediction]:
        predicted: dict[Key, Prediction] = {}
        for strategy, groups in (("Baseline", 1), ("HSP", self.groups)):
            all_to_all = self.all_to_all / groups
            # Each other group sends a worker as many gradients as an all-to-all of its own group does.
            synchronize = (groups - 1) * all_to_all / 2
            run = replay(PaperStep(0.0, self.compute, all_to_all / 2, all_to_all / 2, synchronize + self.other), sync)
            figures = {"step ms": run.step, "all-to-all ms": all_to_all, "communication ms": run.exposed}
            for column, seconds in figures.items():
                fitted = strategy == "Baseline" or column == "all-to-all ms"
                predicted[(TURBOGR, "Table 4", strategy, column)] = Prediction(1e3 * seconds, fitted)
        return predicted


def compared(cell: Cell, prediction: Prediction) -> dict[str, Any]:
    """Returns a cell beside its prediction. "out of memory" has an `error %` of 0 if the model predicts over 100 %."""
    if cell.value is None:
        error = 0.0 if prediction.value > 100 else 100 - prediction.value
    else:
        error = 100 * (prediction.value / cell.value - 1)
    return {
        "paper": cell.paper,
        "table": cell.table,
        "row": cell.row,
        "column": cell.column,
        "published": "out of memory" if cell.value is None else cell.value,
        "model": round(prediction.value, 6),
        "error %": round(error, 3),
        "kind": "fitted" if prediction.fitted else "predicted",
    }
