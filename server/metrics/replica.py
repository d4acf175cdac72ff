"""What is measured of a replica as a whole: what it is, whether it is ready, and what its own checks find."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from server import __version__


class ReplicaMetrics:
    """Prometheus metrics of one API process; of several the page shows the worst."""

    def __init__(self, registry: CollectorRegistry, model_name: str, role: str, backend: str) -> None:
        Gauge(
            "trellis_info",
            "1; its labels say what this replica is",
            ["model_name", "role", "backend", "version"],
            registry=registry,
            multiprocess_mode="livemax",
        ).labels(model_name, role, "none" if role == "router" else backend, __version__).set(1)
        self._ready = Gauge(
            "trellis_ready", "1 if the replica takes requests", registry=registry, multiprocess_mode="livemin"
        )
        self._blocked = Gauge(
            "trellis_event_loop_blocked",
            "1 while an event loop stands still",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._blocks = Counter("trellis_event_loop_blocks", "Times that an event loop stood still", registry=registry)
        self._canaries = Counter(
            "trellis_canary_requests", "Requests that the replica made to try itself", ["outcome"], registry=registry
        )
        for outcome in ("ok", "failed", "timeout"):
            self._canaries.labels(outcome)

    def ready(self, ready: bool) -> None:
        self._ready.set(ready)

    def blocked(self, blocked: bool) -> None:
        """The event loop has stopped, or turns again. Called by the watchdog's thread."""
        self._blocked.set(blocked)
        if blocked:
            self._blocks.inc()

    def canary(self, outcome: str) -> None:
        self._canaries.labels(outcome).inc()
