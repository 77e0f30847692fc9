"""The page for Prometheus.

:tensorflow:serving:request_latency has the name, unit, labels and buckets of TensorFlow Serving, so that one dashboard
reads both servers. The other metrics are fusedrec_*.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tf_fusedrec.models.serve.loaded import Export

PATH = "/monitoring/prometheus/metrics"
# 10 microseconds times powers of 1.8, up to about 25 minutes.
_LATENCY_BUCKETS = [10 * 1.8**power for power in range(33)]
# Counts of the signature "state_statistics", and whether they only grow.
_STATES = {
    "states": False, "tokens": False, "bytes": False, "hits": True, "misses": True, "writes": True, "outrun": True,
    "no_room": True, "evictions": True, "expirations": True, "tier_states": False, "tier_bytes": False,
    "tier_hits": True, "tier_evictions": True, "tier_failures": True,
}  # fmt: skip


class Metrics:
    """Counts of a server.

    Args:
      export: Its version and its cache of user states are asked for each page.
      model_name: Label of the latencies.
    """

    def __init__(self, export: Export, model_name: str):
        disable_created_metrics()  # the times at which counters began
        self._registry = CollectorRegistry()
        latency = Histogram(
            ":tensorflow:serving:request_latency",
            "Distribution of wall time (in microseconds) for requests that were answered.",
            ["model_name", "API", "entrypoint"], buckets=_LATENCY_BUCKETS, registry=self._registry,
        )  # fmt: skip
        self.latency = latency.labels(model_name, "predict", "REST")
        self.requests = Counter(
            "fusedrec_requests", "Predict requests by signature and HTTP status.", ["signature", "status"],
            registry=self._registry,
        )  # fmt: skip
        self.batch = Histogram(
            "fusedrec_batch_requests", "Requests that one call answered.", buckets=[2**power for power in range(9)],
            registry=self._registry,
        )  # fmt: skip
        self.deltas_refused = Counter(
            "fusedrec_deltas_refused", "Deltas of the watched folder that were refused.", registry=self._registry
        )
        self._registry.register(_OfExport(export))

    def page(self) -> bytes:
        """Returns the page. Calls signatures of the export."""
        return generate_latest(self._registry)


class _OfExport(Collector):
    def __init__(self, export: Export):
        self._export = export

    def describe(self) -> list[Metric]:
        return []  # Names need no check, so that registering calls no signature.

    def collect(self) -> Iterator[Metric]:
        export = self._export
        if "version" in export.signatures:
            digest, deltas, changed_rows = export.described_version()
            version = GaugeMetricFamily("fusedrec_version", "1 for the version that answers.", labels=["digest"])
            version.add_metric([digest], 1)
            yield version
            yield GaugeMetricFamily("fusedrec_deltas", "Deltas applied since the server started.", value=deltas)
            yield GaugeMetricFamily(
                "fusedrec_changed_rows", "Rows held besides the rows of the loaded export.", value=changed_rows
            )
        if "state_statistics" in export.signatures:
            counts = export.call("state_statistics", {})
            for name, grows in _STATES.items():
                kind = CounterMetricFamily if grows else GaugeMetricFamily
                yield kind(f"fusedrec_state_cache_{name}", "Of the cache of user states.", value=int(counts[name]))
