"""Metrics of replicas about each other: the replicas that they ask, and the embeddings that they make for others."""

import warnings

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0)


class PeerMetrics:
    """The `RemoteObserver` of a pool, as Prometheus metrics. `does` is what its replicas do, prefill or encode."""

    def __init__(self, registry: CollectorRegistry, model_name: str, does: str) -> None:
        here = (
            "Prompts that were computed by the decode replica itself"
            if does == "prefill"
            else "Requests whose images were encoded here"
        )
        self._model_name = model_name
        self._requests = Counter(
            f"trtllm_{does}_requests",
            f"Requests to {does} replicas",
            ["model_name", "peer", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            f"trtllm_{does}_seconds",
            f"From asking {does} replicas to their handoffs",
            ["model_name"],
            registry=registry,
            buckets=_SECONDS,
        ).labels(model_name)
        self._retries = Counter(
            f"trtllm_{does}_retries", f"Requests that went to another {does} replica", ["model_name"], registry=registry
        ).labels(model_name)
        self._local = Counter(f"trtllm_{does}_local", here, ["model_name", "reason"], registry=registry)
        self._available = Gauge(
            f"trtllm_{does}_peer_available",
            f"1 if the {does} replica is asked, 0 if its circuit breaker is open or it is gone",
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
        """Remove its series, or addresses would pile up.

        The library warns that it cannot do so in the files of several API processes.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self._requests.remove_by_labels({"peer": peer})
            self._available.remove_by_labels({"peer": peer})


class EncodeMetrics:
    """The `EncodeObserver` of `engine/replicas/encode_answers`, as Prometheus metrics of one model."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"trtllm_{name}", text, ["model_name"], registry=registry, multiprocess_mode="livesum").labels(
                model_name
            )

        self._images = Counter(
            "trtllm_encoded_images", "Images encoded for other replicas", ["model_name"], registry=registry
        ).labels(model_name)
        self._seconds = Histogram(
            "trtllm_encoding_seconds",
            "Encoding the images of one request",
            ["model_name"],
            registry=registry,
            buckets=_SECONDS,
        ).labels(model_name)
        self._held = gauge("embeddings_held", "Answers whose embeddings are kept for another replica to read")
        self._held_bytes = gauge("embeddings_held_bytes", "Bytes of their embeddings")

    def encoded(self, images: int, seconds: float) -> None:
        self._images.inc(images)
        self._seconds.observe(seconds)

    def holds(self, answers: int, size: int) -> None:
        self._held.set(answers)
        self._held_bytes.set(size)
