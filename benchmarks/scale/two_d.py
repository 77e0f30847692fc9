"""The clusters of 2D-SP as cost models (fit.py)."""

from __future__ import annotations

from benchmarks.scale.fit import Key, Line, Prediction, printed, replica_sync_s, value_of
from benchmarks.scale.published import TWO_D


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
        self._table = printed()
        full = {n: n * self.EXFM_BATCH / self._qps_2("full", n) for n in (256, 1024)}
        self.exfm = Line.through(256, full[256], 1024, full[1024])
        synchronize = 1024 * self.EXFM_BATCH / self._qps_2("2D", 1024) - self.exfm.at(256)
        self.replica_bytes_per_s = 2 * self.EXFM_BYTES * 3 / (1024 * synchronize)
        steps = {g: 256 * self.CTR_BATCH / self._qps_1("CTR", g) for g in (1, 2)}
        self.ctr = Line.through(256, steps[1], 128, steps[2] - self._sync(self.CTR_BYTES, 2, 256))

    def _qps_1(self, model: str, groups: int) -> float:
        return value_of(self._table, TWO_D, "Table 1", f"{groups} groups", f"{model} QPS")

    def _qps_2(self, strategy: str, gpus: int) -> float:
        return value_of(self._table, TWO_D, "Table 2", f"{gpus} GPUs", f"{strategy} QPS")

    def _sync(self, table_bytes: float, groups: int, gpus: int) -> float:
        return replica_sync_s(table_bytes, groups, gpus, self.replica_bytes_per_s)

    def predictions(self) -> dict[Key, Prediction]:
        return {**self._table_1(), **self._table_2()}

    def _table_1(self) -> dict[Key, Prediction]:
        predicted: dict[Key, Prediction] = {}
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
                return value_of(self._table, TWO_D, "Table 1", f"{groups} groups", f"{model} {column}")

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

        rest = value_of(self._table, TWO_D, "Table 2", "256 GPUs", "full memory %") - varying(256)
        return rest + varying(group)

    def _table_2(self) -> dict[Key, Prediction]:
        predicted: dict[Key, Prediction] = {}
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
