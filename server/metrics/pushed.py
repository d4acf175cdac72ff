"""Prometheus metrics that are updated by each event, with the label model_name."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from server.metrics.polled import GaugeMode


class PushedMetrics:
    """Metrics of one model. A metric with more `labels` needs the values of all labels at each update."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.registry = registry
        self._model_name = model_name

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        family = Counter(f"trtllm_{name}", text, ["model_name", *labels], registry=self.registry)
        return family if labels else family.labels(self._model_name)

    def _gauge(self, name: str, text: str, mode: GaugeMode, *labels: str) -> Gauge:
        names = ["model_name", *labels]
        family = Gauge(f"trtllm_{name}", text, names, registry=self.registry, multiprocess_mode=mode)
        return family if labels else family.labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(f"trtllm_{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
        return family.labels(self._model_name)
