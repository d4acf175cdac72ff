"""Metrics of the publisher of KV-cache events, which runs in one API process of a replica."""

from collections.abc import Callable
from functools import partial

from engine.replicas.publisher.publisher import Publisher
from engine.replicas.publisher.sink import BUSES
from server.metrics.polled import Polled


def watch_publisher(polled: Polled, publisher: Publisher) -> None:
    """Show the counts of a publisher that has started: by data-parallel rank, and by bus."""
    ranks, channels = publisher.ranks, publisher.zmq.channels

    def by_rank(name: str, text: str, count: Callable[[int], int]) -> None:
        numbers = {str(number): number for number in range(len(ranks))}
        polled.counters(
            f"trtllm_kv_event_{name}",
            text,
            "dp_rank",
            lambda: {label: count(number) for label, number in numbers.items()},
        )

    by_rank("published_events", "KV-cache events published", lambda rank: ranks[rank].events)
    by_rank("published_messages", "Messages of KV-cache events published", lambda rank: ranks[rank].messages)
    by_rank("published_bytes", "Bytes of these messages", lambda rank: ranks[rank].bytes)
    by_rank("replayed_messages", "Messages of KV-cache events sent again", lambda rank: channels[rank].replayed)
    by_rank(
        "id_gap_events",
        "KV-cache events lost before the publisher, by gaps in their ids",
        lambda rank: ranks[rank].converter.lost,
    )
    for bus in BUSES:
        polled.counter(
            f"trtllm_kv_event_{bus}_dropped_messages",
            f"Messages of KV-cache events dropped because {bus.upper()} was too slow",
            partial(_dropped, publisher, bus),
        )
        polled.gauge(
            f"trtllm_kv_event_{bus}_waiting_messages",
            f"Messages of KV-cache events that wait for {bus.upper()}",
            partial(_waiting, publisher, bus),
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


def _dropped(publisher: Publisher, bus: str) -> int:
    return sum(sink.dropped for sink in publisher.buses if sink.name == bus)


def _waiting(publisher: Publisher, bus: str) -> int:
    return sum(sink.waiting for sink in publisher.buses if sink.name == bus)
