"""What is measured of the publisher of KV-cache events, which runs in one API process of a replica."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from engine.replicas.publisher.publisher import Publisher, Rank


class KvEventMetrics:
    """The publisher's own counts as Prometheus metrics of one model, by data-parallel rank; `update` brings them up to date."""

    def __init__(self, registry: CollectorRegistry, model_name: str, publisher: Publisher) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"trtllm_kv_event_{name}", text, ["model_name", "dp_rank"], registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            family = Gauge(
                f"trtllm_kv_event_{name}", text, ["model_name"], registry=registry, multiprocess_mode="livemax"
            )
            return family.labels(model_name)

        self._model_name = model_name
        self._publisher = publisher
        self._of_rank: list[tuple[Counter, Callable[[Rank], int]]] = [
            (counter("published_events", "KV-cache events published"), lambda rank: rank.events),
            (
                counter("published_messages", "Messages of KV-cache events published"),
                lambda rank: rank.channel.sequence,
            ),
            (counter("published_bytes", "Bytes of these messages"), lambda rank: rank.bytes),
            (
                counter("replayed_messages", "Messages of KV-cache events sent again"),
                lambda rank: rank.channel.replayed,
            ),
            (
                counter("id_gap_events", "KV-cache events lost before they came here, by gaps in their ids"),
                lambda rank: rank.converter.lost,
            ),
        ]
        self._seen: dict[tuple[Counter, int], int] = {}
        self._nats_dropped = Counter(
            "trtllm_kv_event_nats_dropped_messages",
            "Messages of KV-cache events that NATS could not take in time",
            ["model_name"],
            registry=registry,
        ).labels(model_name)
        self._nats_waiting = gauge("nats_waiting_messages", "Messages of KV-cache events that wait for NATS")
        self._nats_seen = 0
        gauge("buffer_capacity", "Messages of KV-cache events that are kept to be sent again").set(
            publisher.config.buffer
        )
        self._up = gauge("publisher_up", "1 while KV-cache events are published, 0 once that has failed")

    def update(self) -> None:
        for number, rank in enumerate(self._publisher.ranks):
            for counter, value in self._of_rank:
                now, before = value(rank), self._seen.get((counter, number), 0)
                counter.labels(self._model_name, str(number)).inc(now - before)
                self._seen[counter, number] = now
        self._up.set(self._publisher.failure is None)
        if (nats := self._publisher.nats) is not None:
            self._nats_dropped.inc(nats.dropped - self._nats_seen)
            self._nats_seen = nats.dropped
            self._nats_waiting.set(nats.waiting)
