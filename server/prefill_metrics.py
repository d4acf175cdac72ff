"""What a decode replica measures of its prefill replicas."""

import warnings

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0)


class PrefillMetrics:
    """The `Observer` of `engine/disaggregated`, as Prometheus metrics of one model."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._requests = Counter(
            "trtllm_prefill_requests", "Requests to prefill replicas", ["model_name", "peer", "outcome"], registry=registry
        )
        self._seconds = Histogram(
            "trtllm_prefill_seconds", "From asking a prefill replica to its handoff", ["model_name"], registry=registry, buckets=_SECONDS
        ).labels(model_name)
        self._retries = Counter(
            "trtllm_prefill_retries", "Requests that went to another prefill replica", ["model_name"], registry=registry
        ).labels(model_name)
        self._local = Counter(
            "trtllm_prefill_local", "Prompts that were computed by the decode replica itself", ["model_name", "reason"], registry=registry
        )
        self._available = Gauge(
            "trtllm_prefill_peer_available",
            "1 if the prefill replica is asked, 0 if its circuit breaker is open or it is gone",
            ["model_name", "peer"],
            registry=registry,
            multiprocess_mode="livemin",
        )

    def answered(self, peer: str, outcome: str, seconds: float) -> None:
        self._requests.labels(self._model_name, peer, outcome).inc()
        if outcome == "ok":
            self._seconds.observe(seconds)

    def retried(self) -> None:
        self._retries.inc()

    def computed_locally(self, reason: str) -> None:
        self._local.labels(self._model_name, reason).inc()

    def available(self, peer: str, available: bool) -> None:
        self._available.labels(self._model_name, peer).set(available)

    def gone(self, peer: str) -> None:
        """Forget its series, or addresses would pile up. Several API processes keep theirs in files, which the library says it leaves."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self._requests.remove_by_labels({"peer": peer})
            self._available.remove_by_labels({"peer": peer})
