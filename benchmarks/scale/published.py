"""The published measurements on hundreds to thousands of workers, which benchmarks.scale predicts.

Each cell names its paper, table, row and column. Figures are as printed. TABLE III of NestPipe gives throughput in 10^5
samples per second with two decimals, so that a printed 0.26 is exact to 2 % only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

NESTPIPE, TURBOGR, TWO_D, MTGRBOOST, FUSEDREC = "NestPipe", "TurboGR", "2D-SP", "MTGRBoost", "FusedRec"


class Cell(NamedTuple):
    """One printed figure."""

    paper: str
    table: str
    row: str  # workers, or the strategy
    column: str
    value: float | None  # None: out of memory

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self[:4]


WORKERS = (128, 256, 512, 1024, 1536)
# NestPipe, TABLE III: QPS in 10^5, scaling factor in % against 128 workers.
_QPS = {
    "TorchRec": (0.26, 0.47, 0.68, 1.09, 1.36),
    "2D-SP": (0.27, 0.49, 0.75, 1.22, 1.60),
    "UniEmb": (0.33, 0.63, 1.17, 2.04, 2.65),
    "NestPipe": (0.37, 0.72, 1.43, 2.80, 4.14),
}
_SCALING = {
    "TorchRec": (91.23, 66.64, 53.36, 44.34),
    "2D-SP": (91.36, 69.64, 56.67, 49.32),
    "UniEmb": (96.13, 89.21, 78.00, 67.62),
    "NestPipe": (98.39, 97.33, 95.63, 94.07),
}
# NestPipe, TABLE III: speedup over TorchRec at the same number of workers.
_SPEEDUP = {
    "2D-SP": (1.04, 1.04, 1.10, 1.12, 1.18),
    "UniEmb": (1.27, 1.34, 1.72, 1.87, 1.98),
    "NestPipe": (1.42, 1.53, 2.10, 2.57, 3.06),
}
# NestPipe, TABLE II, 1536 NPUs: step, lookup and exposed communication in ms. TABLE IV: with 2D-SP.
_STEP_1536 = {
    "TorchRec": (5793.83, 2870.99, 1207.85),
    "2D-SP": (4914.01, 2766.68, 438.36),
    "UniEmb": (2919.76, 36.21, 1169.01),
    "NestPipe": (1895.98, 30.19, 154.23),
}
# NestPipe, TABLE II, 128 GPUs, FuXi on KuaiRand-27K: the same columns.
GPU_METHODS = ("TorchRec", "2D-SP", "UniEmb", "NestPipe")
_STEP_GPU = {
    "TorchRec": (4207.94, 856.63, 312.19),
    "2D-SP": (4052.98, 907.87, 107.23),
    "UniEmb": (3384.05, 23.49, 327.29),
    "NestPipe": (3090.45, 12.77, 38.95),
}
# NestPipe, Figs. 8 to 10, as section VII prints them: row, column, value.
_NESTPIPE_TEXT = (
    ("Fig. 8", "128", "TorchRec utilization %", 66.4), ("Fig. 8", "1536", "TorchRec utilization %", 29.6),
    ("Fig. 8", "128", "2D-SP utilization %", 70.5), ("Fig. 8", "1536", "2D-SP utilization %", 34.8),
    ("Fig. 9", "micro-batch 16", "communication ms", 1331.33), ("Fig. 9", "micro-batch 16", "exposed %", 25.2),
    ("Fig. 9", "micro-batch 16, clustered", "exposed ms", 27.71),
    ("Fig. 10", "dimension 1024", "exposed %", 12.9), ("Fig. 10", "8 layers", "compute ms", 3393.12),
    ("Fig. 10", "8 layers", "exposed ms", 146.23), ("Fig. 10", "2 layers", "compute ms", 892.78),
    ("Fig. 10", "2 layers", "exposed %", 27.9), ("Fig. 10", "length 512", "compute ms", 850.08),
    ("Fig. 10", "length 2048", "compute ms", 3399.96), ("Fig. 10", "length 2048", "exposed ms", 165.12),
)  # fmt: skip
# TurboGR, Table 1: TFLOPs per step, MFU in %, linear scalability.
TABLE_1_MODELS = {
    "HSTU-tiny": (0.13, 0.43, 0.38), "HSTU-small": (0.59, 1.96, 0.58), "HSTU-medium": (1.90, 8.00, 0.70),
    "HSTU-large": (4.33, 24.74, 0.93), "HSTU-long": (7.15, 34.08, 0.97), "FuXi-tiny": (0.27, 0.88, 0.35),
    "FuXi-small": (1.18, 3.78, 0.50), "FuXi-medium": (3.13, 16.76, 0.74), "FuXi-large": (8.25, 39.34, 0.94),
    "FuXi-long": (11.54, 54.71, 0.97),
}  # fmt: skip
# TurboGR, Table 3: largest difference of tokens, step in ms, delay by imbalance in ms, the same in % of the step.
TABLE_3 = {
    "Amazon-all": ((623, 422.0, 15.0, 3.55), (31, 405.0, 6.5, 1.48)),
    "KuaiRand-27K": ((10726, 2340.0, 1100.0, 47.01), (559, 1540.0, 37.0, 2.40)),
}
# TurboGR, Table 6: computing, communication and communication not overlapped in ms, computing in % of the step.
TABLE_6 = {"FuXi-large": (656.39, 326.56, 38.78, 94.25), "FuXi-long": (1712.0, 436.71, 97.88, 94.29)}
# MTGRBoost, Fig. 17 and section 6.4: speed-up at 128 GPUs against 8, in % of the ideal, over its models.
_FIG_17 = {"lowest": 62.75, "highest": 78.5}
# NestPipe, TABLE IV: all communication, exposed communication in ms, QPS in 10^5.
_TABLE_IV = {
    "2D-SP": (438.36, 438.36, 1.60),
    "NestPipe": (1185.60, 154.23, 4.14),
    "NestPipe+2D-SP": (452.34, 55.64, 4.32),
}
# 2D-SP, Table 1: groups -> QPS, peak and mean memory in %, imbalance ratio.
_TABLE_1 = {
    "CTR": {
        1: (1.53e6, 72.40, 49.66, 5.70), 2: (2.34e6, 53.65, 47.65, 2.01), 4: (2.66e6, 54.74, 50.59, 1.57),
        8: (2.26e6, 69.90, 62.91, 1.53),
    },
    "ExFM": {
        1: (5.51e5, 99.44, 76.95, 5.18), 2: (6.31e5, 85.57, 79.15, 2.23), 4: (6.54e5, 87.77, 82.81, 1.65),
        8: (6.32e5, 94.85, 90.22, 1.63),
    },
}  # fmt: skip
# 2D-SP, Table 2: GPUs -> peak memory in %, QPS, scaling factor in %.
_FULL = {256: (96.54, 1.76e5, None), 512: (95.47, 3.37e5, 95.0), 1024: (100.0, 5.61e5, 79.7)}
_GROUPED = {
    256: (96.54, 1.76e5, None), 512: (96.59, 3.56e5, 100.0), 1024: (94.95, 6.76e5, 96.0), 2048: (95.07, 1.34e6, 95.0),
    4096: (95.56, 2.53e6, 90.0),
}  # fmt: skip
# TurboGR, Table 4: step, all-to-all delay and whole communication in ms.
_TABLE_4 = {"Baseline": (1970.0, 498.0, 613.0), "HSP": (1790.0, 120.0, 373.0)}


def cells() -> Iterator[Cell]:
    """Yields all cells."""

    def table(paper: str, name: str, rows: Mapping[Any, Sequence[float | None]], columns: Sequence[str], form: str):
        """Yields the cells of a dict of rows. `form` makes "row|column" of the key and a column's name."""
        for key, values in rows.items():
            for column, value in zip(columns, values):
                row, _, of_row = form.format(key, column).partition("|")
                yield Cell(paper, name, row, of_row, value)

    for method in _QPS:
        for n, workers in enumerate(map(str, WORKERS)):
            yield Cell(NESTPIPE, "TABLE III", workers, f"{method} QPS 1e5", _QPS[method][n])
            if method != "TorchRec":
                yield Cell(NESTPIPE, "TABLE III", workers, f"{method} speedup", _SPEEDUP[method][n])
            if n:
                yield Cell(NESTPIPE, "TABLE III", workers, f"{method} scaling %", _SCALING[method][n - 1])
    times = ("step ms", "lookup ms", "exposed ms")
    yield from table(NESTPIPE, "TABLE II", _STEP_1536, times, "1536 NPUs|{} {}")
    yield from table(NESTPIPE, "TABLE IV", _TABLE_IV, ("communication ms", "exposed ms", "QPS 1e5"), "1536|{} {}")
    yield from table(NESTPIPE, "Fig. 2", {"TorchRec": (24.4, 9.2)}, ("lookup %", "communication %"), "128|{} {}")
    for model, rows in _TABLE_1.items():
        columns = ("QPS", "peak memory %", "mean memory %", "imbalance")
        yield from table(TWO_D, "Table 1", rows, columns, f"{{}} groups|{model} {{}}")
    for strategy, of_gpus in (("full", _FULL), ("2D", _GROUPED)):
        found = table(TWO_D, "Table 2", of_gpus, ("memory %", "QPS", "scaling %"), f"{{}} GPUs|{strategy} {{}}")
        yield from (cell for cell in found if cell.value is not None)
    for gpus in (2048, 4096):
        yield Cell(TWO_D, "Table 2", f"{gpus} GPUs", "full memory %", None)
    yield from table(TURBOGR, "Table 4", _TABLE_4, ("step ms", "all-to-all ms", "communication ms"), "{}|{}")
    yield from table(NESTPIPE, "TABLE II", _STEP_GPU, times, "128 GPUs|{} {}")
    yield from (Cell(NESTPIPE, *cell) for cell in _NESTPIPE_TEXT)
    of_models = {model: figures[1:] for model, figures in TABLE_1_MODELS.items()}
    yield from table(TURBOGR, "Table 1", of_models, ("MFU %", "linear scalability"), "{}|{}")
    for data, strategies in TABLE_3.items():
        for strategy, (_, *of_strategy) in zip(("fixed", "balanced"), strategies):
            delays = ("step ms", "delay ms", "delay %")
            yield from table(TURBOGR, "Table 3", {data: of_strategy}, delays, f"{{}}|{strategy} {{}}")
    hidden = {model: figures[2:] for model, figures in TABLE_6.items()}
    yield from table(TURBOGR, "Table 6", hidden, ("not overlapped ms", "computing %"), "{}|{}")
    yield from (Cell(MTGRBOOST, "Fig. 17", "128 GPUs", f"{which} scaling %", x) for which, x in _FIG_17.items())
    yield Cell(FUSEDREC, "Fig. 6", "128 GPUs", "scaling factor", 0.93)
