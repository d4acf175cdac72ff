"""Prometheus metrics whose values other parts keep; they are read when a page is rendered."""

from collections.abc import Callable, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

GaugeMode = Literal["livesum", "livemax", "livemin"]
"""Rule by which the page combines the gauges of several API processes."""
_NO_LABEL = ""


class Polled:
    """Metrics with the labels `labels`, refreshed by `update`. A counter grows by as much as its number has grown since
    the last update.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = dict(labels)
        self._counters: list[tuple[Counter, str, Callable[[], Mapping[str, float]]]] = []
        self._gauges: list[tuple[Gauge, Callable[[], float]]] = []
        self._seen: dict[tuple[Counter, str], float] = {}

    def counter(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Show a number that only grows."""
        self.counters(name, text, _NO_LABEL, lambda: {_NO_LABEL: read()})

    def counters(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Show numbers that only grow, by the values of one more label."""
        names = [*self._labels, label] if label else [*self._labels]
        counter = Counter(name, text, names, registry=self._registry)
        self._counters.append((counter, label, read))

    def gauge(self, name: str, text: str, read: Callable[[], float], mode: GaugeMode) -> None:
        """Show a number that grows and shrinks."""
        gauge = Gauge(name, text, [*self._labels], registry=self._registry, multiprocess_mode=mode)
        self._gauges.append((gauge.labels(**self._labels) if self._labels else gauge, read))

    def update(self) -> None:
        """Read all numbers. Cheap."""
        for counter, label, read in self._counters:
            for value, now in read().items():
                labels = self._labels | ({label: value} if label else {})
                (counter.labels(**labels) if labels else counter).inc(now - self._seen.get((counter, value), 0))
                self._seen[counter, value] = now
        for gauge, read_gauge in self._gauges:
            gauge.set(read_gauge())
