"""Metrics of a router. Replicas are numbers, as in the header x-trellis-replica."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.replicas.routing.load import Load

_SECONDS = (
    0.00001,
    0.000025,
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
)


class RoutingMetrics:
    """The `Observer` of `engine/replicas/routing`."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"trtllm_router_{name}", text, ["model_name", *labels], registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"trtllm_router_{name}", text, ["model_name", "replica"], registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"trtllm_router_{name}_seconds", text, ["model_name"], registry=registry, buckets=_SECONDS)

        self._requests = counter("requests", "Attempts at replicas", "replica", "outcome")
        self._prompt = counter("prompt_tokens", "Tokens of the prompts whose tokens are known", "replica")
        self._overlap = counter("overlap_tokens", "Those that the replica had in its cache, as far as known", "replica")
        self._retries = counter("retries", "Requests that went to another replica").labels(model_name)
        self._affine = counter("session_requests", "Requests that went where their session is").labels(model_name)
        self._gaps = counter("event_gaps", "Times that KV events were missed", "replica")
        self._missed = counter("event_messages_missed", "Messages that did not come in their turn", "replica")
        self._replayed = counter("event_messages_replayed", "Messages that came when asked for again", "replica")
        self._malformed = counter("event_messages_malformed", "Messages that made no sense", "replica")
        self._unattached = counter("unattached_blocks", "Blocks left out, as their parent was not known", "replica")
        self._tokenise = seconds("tokenize", "Rendering and tokenising a prompt").labels(model_name)
        self._choose = seconds("choose", "Choosing a replica").labels(model_name)
        self._available = gauge("replica_available", "1 if the replica is asked")
        self._blocks = gauge("index_blocks", "KV blocks of the replica that are known")
        self._in_flight = gauge("requests_in_flight", "Requests that the replica is at")
        self._tokens = gauge("tokens_in_flight", "Their work, in tokens to compute")

    def answered(self, replica: int, outcome: str) -> None:
        self._requests.labels(self._model_name, replica, outcome).inc()

    def chosen(self, replica: int, prompt: int, overlap: int, seconds: float) -> None:
        self._choose.observe(seconds)
        self._prompt.labels(self._model_name, replica).inc(prompt)
        self._overlap.labels(self._model_name, replica).inc(overlap)

    def tokenised(self, seconds: float) -> None:
        self._tokenise.observe(seconds)

    def retried(self) -> None:
        self._retries.inc()

    def affine(self) -> None:
        self._affine.inc()

    def state(self, replica: int, available: bool, blocks: int, load: Load) -> None:
        self._available.labels(self._model_name, replica).set(available)
        self._blocks.labels(self._model_name, replica).set(blocks)
        self._in_flight.labels(self._model_name, replica).set(load.requests)
        self._tokens.labels(self._model_name, replica).set(load.tokens)

    def gap(self, replica: int, missed: int) -> None:
        self._gaps.labels(self._model_name, replica).inc()
        self._missed.labels(self._model_name, replica).inc(missed)

    def replayed(self, replica: int, messages: int) -> None:
        self._replayed.labels(self._model_name, replica).inc(messages)

    def malformed(self, replica: int) -> None:
        self._malformed.labels(self._model_name, replica).inc()

    def unattached(self, replica: int, blocks: int) -> None:
        self._unattached.labels(self._model_name, replica).inc(blocks)

    def gone(self, replica: int) -> None:
        """Its number may be another's later."""
        for gauge in (self._available, self._blocks, self._in_flight, self._tokens):
            gauge.labels(self._model_name, replica).set(0)
