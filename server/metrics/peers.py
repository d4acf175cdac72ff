"""Metrics of requests to other replicas, and of embeddings that are made for others."""

import warnings

from prometheus_client import CollectorRegistry

from server.metrics.pushed import PushedMetrics

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0),
    *(60.0, 120.0, 300.0, 600.0),
)
_LOCAL = {
    "prefill": "Prompts that were computed by the decode replica itself",
    "encode": "Requests whose images were encoded here",
}


class PeerMetrics(PushedMetrics):
    """The `RemoteObserver` of a pool, as Prometheus metrics. `does` is what its replicas do, prefill or encode."""

    def __init__(self, registry: CollectorRegistry, model_name: str, does: str) -> None:
        super().__init__(registry, model_name)
        self._requests = self._counter(f"{does}_requests", f"Requests to {does} replicas", "peer", "outcome")
        self._seconds = self._histogram(
            f"{does}_seconds", f"Seconds from asking a {does} replica to its answer", _SECONDS
        )
        self._retries = self._counter(f"{does}_retries", f"Requests that went to another {does} replica")
        self._local = self._counter(f"{does}_local", _LOCAL[does], "reason")
        if does == "encode":
            text = "Prompts' embeddings that stayed with encode replicas: released when read, or lost"
            self._remote = self._counter("encode_remote_embeddings", text, "outcome")
        available = f"1 if the {does} replica is asked, 0 if its circuit breaker is open or it is gone"
        self._available = self._gauge(f"{does}_peer_available", available, "livemin", "peer")

    def answered(self, peer: str, outcome: str, seconds: float) -> None:
        self._requests.labels(self._model_name, peer, outcome).inc()
        if outcome == "ok":
            self._seconds.observe(seconds)

    def retried(self) -> None:
        self._retries.inc()

    def computed_locally(self, reason: str) -> None:
        self._local.labels(self._model_name, reason).inc()

    def remote_rows(self, outcome: str) -> None:
        self._remote.labels(self._model_name, outcome).inc()

    def available(self, peer: str, available: bool) -> None:
        self._available.labels(self._model_name, peer).set(available)

    def gone(self, peer: str) -> None:
        """Remove the series of a peer, so that old addresses do not accumulate. In the files of several API processes
        the library cannot, and warns.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self._requests.remove_by_labels({"peer": peer})
            self._available.remove_by_labels({"peer": peer})


class EncodeMetrics(PushedMetrics):
    """The `EncodeObserver` of `engine/replicas/encode_answers`, as Prometheus metrics of one model."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        super().__init__(registry, model_name)
        self._images = self._counter("encoded_images", "Images, videos and recordings encoded for other replicas")
        self._seconds = self._histogram(
            "encoding_seconds", "Seconds that encoding the media of one request took", _SECONDS
        )
        held = "Answers whose embeddings are kept for another replica to read"
        self._held = self._gauge("embeddings_held", held, "livesum")
        self._held_bytes = self._gauge(
            "embeddings_held_bytes", "Bytes of the embeddings that are kept for other replicas to read", "livesum"
        )

    def encoded(self, images: int, seconds: float) -> None:
        self._images.inc(images)
        self._seconds.observe(seconds)

    def holds(self, answers: int, size: int) -> None:
        self._held.set(answers)
        self._held_bytes.set(size)
