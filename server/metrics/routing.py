"""A router's Prometheus metrics. Replicas are numbers, as in the header x-trellis-replica."""

from collections import defaultdict

from prometheus_client import CollectorRegistry, Counter, Gauge

from engine.replicas.routing.fleet import Fleet
from server.metrics.pushed import PushedMetrics

_SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class RoutingMetrics(PushedMetrics):
    """The `RoutingObserver` of a fleet of one model. `update` reads the other metrics from the fleet."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        super().__init__(registry, model_name)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return self._counter(f"router_{name}", text, *labels)

        def gauge(name: str, text: str) -> Gauge:
            return self._gauge(f"router_{name}", text, "livesum", "replica")

        self._requests = counter("requests", "Attempts at replicas", "replica", "outcome")
        self._prompt = counter("prompt_tokens", "Tokens of the prompts whose tokens are known", "replica")
        self._overlap = counter(
            "overlap_tokens", "Tokens of prompts that the replica had in its cache, as far as known", "replica"
        )
        self._retries = counter("retries", "Requests that went to another replica")
        self._affine = counter("session_requests", "Requests that went to the replica of their session")
        self._events = {
            "gaps": counter("event_gaps", "Times that KV events were missed", "replica"),
            "missed": counter("event_messages_missed", "Messages of KV events that were missed", "replica"),
            "replayed": counter(
                "event_messages_replayed", "Missed messages of KV events that came when asked for again", "replica"
            ),
            "malformed": counter("event_messages_malformed", "Malformed messages of KV events", "replica"),
            "unattached": counter(
                "unattached_blocks", "KV blocks that were ignored because their parent is unknown", "replica"
            ),
        }
        """Counters by field of `EventCounts`."""
        self._seen: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._numbers: set[int] = set()
        self._tokenise = self._histogram(
            "router_tokenize_seconds", "Seconds that rendering and tokenising a prompt took", _SECONDS
        )
        self._choose = self._histogram("router_choose_seconds", "Seconds that choosing a replica took", _SECONDS)
        self._available = gauge("replica_available", "1 if the replica gets requests")
        self._blocks = gauge("index_blocks", "KV blocks of the replica that the router knows")
        self._in_flight = gauge("requests_in_flight", "Requests that run on the replica")
        self._tokens = gauge("tokens_in_flight", "Work of the requests on the replica, in tokens to compute")

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

    def update(self, fleet: Fleet) -> None:
        """Bring gauges and counts of events up to date."""
        for replica in fleet.replicas:
            load = replica.load
            self._set(replica.number, replica.available, fleet.blocks(replica), load.requests, load.tokens)
        numbers = {replica.number for replica in fleet.replicas}
        for number in self._numbers - numbers:  # it may become another replica's
            self._set(number, False, 0, 0, 0)
        self._numbers = numbers
        for number, counts in fleet.event_counts.items():
            for name, family in self._events.items():
                if new := getattr(counts, name) - self._seen[name, number]:
                    family.labels(self._model_name, number).inc(new)
                    self._seen[name, number] += new

    def _set(self, number: int, available: bool, blocks: int, requests: int, tokens: float) -> None:
        self._available.labels(self._model_name, number).set(available)
        self._blocks.labels(self._model_name, number).set(blocks)
        self._in_flight.labels(self._model_name, number).set(requests)
        self._tokens.labels(self._model_name, number).set(tokens)
