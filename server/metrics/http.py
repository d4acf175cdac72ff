"""Metrics of HTTP by prometheus-fastapi-instrumentator, with labels that clients cannot choose."""

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_fastapi_instrumentator import Instrumentator
from prometheus_fastapi_instrumentator.metrics import Info, default

_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"})
_SECONDS_BY_ROUTE = (0.05, 0.1, 0.5, 1, 5, 10, 30, 60)


def instrument(app: FastAPI, registry: CollectorRegistry) -> None:
    """Measure every request by its route's template (`none` without a route), method (`other` for rare ones) and class
    of status.
    """
    measure = default(registry=registry, latency_lowr_buckets=_SECONDS_BY_ROUTE)
    assert measure is not None, "the registry is the application's own"

    def measure_bounded(info: Info) -> None:
        if info.method not in _METHODS:
            info.method = "other"
        measure(info)

    Instrumentator(registry=registry).add(measure_bounded).instrument(app)
