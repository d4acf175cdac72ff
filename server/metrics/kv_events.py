"""Metrics of the publisher of KV-cache events, which runs in one API process of a replica."""

from collections import defaultdict

from prometheus_client import CollectorRegistry, Counter, Gauge

from engine.replicas.publisher.publisher import Publisher
from engine.replicas.publisher.sink import BUSES


class KvEventMetrics:
    """The publisher's own counts as Prometheus metrics of one model; `update` brings them up to date."""

    def __init__(self, registry: CollectorRegistry, model_name: str, publisher: Publisher) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"trtllm_kv_event_{name}", text, ["model_name", *labels], registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            family = Gauge(
                f"trtllm_kv_event_{name}", text, ["model_name"], registry=registry, multiprocess_mode="livemax"
            )
            return family.labels(model_name)

        self._model_name = model_name
        self._publisher = publisher
        self._of_rank = [
            counter("published_events", "KV-cache events published", "dp_rank"),
            counter("published_messages", "Messages of KV-cache events published", "dp_rank"),
            counter("published_bytes", "Bytes of these messages", "dp_rank"),
            counter("replayed_messages", "Messages of KV-cache events sent again", "dp_rank"),
            counter("id_gap_events", "KV-cache events lost before they came here, by gaps in their ids", "dp_rank"),
        ]
        self._dropped: dict[str, Counter] = {}
        self._waiting: dict[str, Gauge] = {}
        for bus in BUSES:
            text = f"Messages of KV-cache events that {bus.upper()} could not take in time"
            self._dropped[bus] = counter(f"{bus}_dropped_messages", text).labels(model_name)
            self._waiting[bus] = gauge(
                f"{bus}_waiting_messages", f"Messages of KV-cache events that wait for {bus.upper()}"
            )
        self._seen: defaultdict[Counter, int] = defaultdict(int)
        gauge("buffer_capacity", "Messages of KV-cache events that are kept to be sent again").set(
            publisher.config.buffer
        )
        self._up = gauge("publisher_up", "1 while KV-cache events are published, 0 once that has failed")

    def update(self) -> None:
        for number, (rank, channel) in enumerate(zip(self._publisher.ranks, self._publisher.zmq.channels, strict=True)):
            counts = (rank.events, rank.messages, rank.bytes, channel.replayed, rank.converter.lost)
            for family, count in zip(self._of_rank, counts, strict=True):
                self._count(family.labels(self._model_name, str(number)), count)
        for sink in self._publisher.buses:
            self._count(self._dropped[sink.name], sink.dropped)
            self._waiting[sink.name].set(sink.waiting)
        self._up.set(self._publisher.failure is None)

    def _count(self, counter: Counter, count: int) -> None:
        counter.inc(count - self._seen[counter])
        self._seen[counter] = count
