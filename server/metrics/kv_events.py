"""Metrics of the publisher of KV-cache events, which runs in one API process of a replica."""

from collections.abc import Callable, Mapping

from engine.replicas.publisher.publisher import Publisher, Rank
from server.metrics.polled import Polled


def watch_publisher(polled: Polled, publisher: Publisher) -> None:
    """Show the publisher's counts, those of its messages by data-parallel rank."""

    def by_rank(name: str, text: str, count: Callable[[Rank], int]) -> None:
        def read() -> Mapping[str, float]:
            return {str(number): count(rank) for number, rank in enumerate(publisher.ranks)}

        polled.counters(f"trtllm_kv_event_{name}", text, "dp_rank", read)

    by_rank("published_events", "KV-cache events published", lambda rank: rank.events)
    by_rank("published_messages", "Messages of KV-cache events published", lambda rank: rank.channel.sequence)
    by_rank("published_bytes", "Bytes of these messages", lambda rank: rank.bytes)
    by_rank("replayed_messages", "Messages of KV-cache events sent again", lambda rank: rank.channel.replayed)
    by_rank(
        "id_gap_events",
        "KV-cache events lost before the publisher, by gaps in their ids",
        lambda rank: rank.converter.lost,
    )
    nats = publisher.nats
    polled.counter(
        "trtllm_kv_event_nats_dropped_messages",
        "Messages of KV-cache events dropped because NATS was too slow",
        lambda: nats.dropped if nats is not None else 0,
    )
    polled.gauge(
        "trtllm_kv_event_nats_waiting_messages",
        "Messages of KV-cache events that wait for NATS",
        lambda: nats.waiting if nats is not None else 0,
        "livemax",
    )
    polled.gauge(
        "trtllm_kv_event_buffer_capacity",
        "Number of KV-cache event messages kept for sending again",
        lambda: publisher.config.buffer,
        "livemax",
    )
    polled.gauge(
        "trtllm_kv_event_publisher_up",
        "1 while KV-cache events are published, 0 once that has failed",
        lambda: publisher.failure is None,
        "livemax",
    )
