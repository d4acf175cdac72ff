"""Metrics of the publisher of KV-cache events, which runs in one API process of a replica."""

from collections.abc import Callable, Iterable
from functools import partial

from engine.replicas.publisher.publisher import Publisher
from engine.replicas.publisher.sink import BUSES
from server.metrics.polled import Polled


def watch_publisher(polled: Polled, publisher: Publisher) -> None:
    """Show the counts of a publisher that has started: by data-parallel rank, and by bus."""
    ranks, channels = publisher.ranks, publisher.zmq.channels
    prefix = "trtllm_kv_event"

    def by_rank(name: str, text: str, counts: Callable[[], Iterable[int]]) -> None:
        polled.counters(
            f"{prefix}_{name}", text, "dp_rank", lambda: {str(rank): now for rank, now in enumerate(counts())}
        )

    def of_bus(bus: str, attribute: str) -> int:
        return sum(getattr(sink, attribute) for sink in publisher.buses if sink.name == bus)

    by_rank("published_events", "KV-cache events published", lambda: (rank.events for rank in ranks))
    by_rank("published_messages", "Messages of KV-cache events published", lambda: (rank.messages for rank in ranks))
    by_rank(
        "published_bytes", "Bytes of the messages of KV-cache events published", lambda: (rank.bytes for rank in ranks)
    )
    replayed = "Messages of KV-cache events sent again"
    by_rank("replayed_messages", replayed, lambda: (channel.replayed for channel in channels))
    lost = "KV-cache events lost before the publisher, by gaps in their ids"
    by_rank("id_gap_events", lost, lambda: (rank.converter.lost for rank in ranks))
    for bus in BUSES:
        dropped = f"Messages of KV-cache events dropped because {bus.upper()} was too slow"
        polled.counter(f"{prefix}_{bus}_dropped_messages", dropped, partial(of_bus, bus, "dropped"))
        waiting = f"Messages of KV-cache events that wait for {bus.upper()}"
        polled.gauge(f"{prefix}_{bus}_waiting_messages", waiting, partial(of_bus, bus, "waiting"), "livemax")
    kept = "Number of KV-cache event messages kept for sending again"
    polled.gauge(f"{prefix}_buffer_capacity", kept, lambda: publisher.config.buffer, "livemax")
    up = "1 while KV-cache events are published, 0 once that has failed"
    polled.gauge(f"{prefix}_publisher_up", up, lambda: publisher.failure is None, "livemax")
