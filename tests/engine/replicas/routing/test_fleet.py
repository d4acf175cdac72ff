"""Replicas that come and go: by DNS, by failing, by being ready or not."""

import asyncio
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager

import pytest

from engine.replicas import pool as pool_module
from engine.replicas.client import ConnectionFailed
from engine.replicas.discovery import Addresses
from engine.replicas.routing.fleet import EventSources, Fleet, RoutedPrompt
from engine.replicas.routing.policy import Policy
from engine.replicas.routing.sessions import Affinity, Sessions
from tests.support.routing import Bare, Seen, Sender, stored, tokens_of, two_senders
from tests.support.waiting import until

TWO_RANKS = b'HTTP/1.1 200 OK\r\ncontent-length: 38\r\n\r\n{"runtime": {"data_parallel_size": 2}}'
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
PROMPT = RoutedPrompt([*tokens_of(1), *tokens_of(2), 5], count=5)


class Changing(Addresses):
    """Addresses of the test's making."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__(())
        self.urls = urls

    @property
    def change(self) -> bool:
        return True

    async def find(self, known: Set[str]) -> list[str]:
        return self.urls


@asynccontextmanager
async def running(addresses: Addresses, sources: EventSources | None = None) -> AsyncIterator[tuple[Fleet, Seen]]:
    seen = Seen()
    fleet = Fleet(addresses, sources or EventSources(), Policy("kv", seed=1), seen)
    await fleet.start()
    try:
        yield fleet, seen
    finally:
        await fleet.close()


async def test_names_are_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "RESOLVE_SECONDS", 0.05)
    async with Bare(OK) as one, Bare(OK) as two, Bare(OK) as three:
        addresses = Changing([one.url, two.url])
        async with running(addresses) as (fleet, _):
            assert {(replica.url, replica.number) for replica in fleet.replicas} == {(one.url, 0), (two.url, 1)}
            addresses.urls = [two.url, three.url]
            await until(lambda: one.url not in {replica.url for replica in fleet.replicas})
            assert {(replica.url, replica.number) for replica in fleet.replicas} == {(two.url, 1), (three.url, 0)}
            await until(lambda: all(replica.available for replica in fleet.replicas))
            addresses.urls = []
            await until(lambda: not fleet.replicas)
            assert not fleet.healthy
            assert not list(fleet.assign(PROMPT))


async def test_responses_push_no_session_out() -> None:
    async with Bare(OK) as one, Bare(OK) as two:
        seen, session = Seen(), Affinity(session="a")
        tables = (Sessions(1, 60.0), Sessions(1, 60.0))
        fleet = Fleet(Changing([one.url, two.url]), EventSources(), Policy("kv", seed=1), seen, (), 3, *tables)
        await fleet.start()
        await until(lambda: all(replica.available for replica in fleet.replicas))
        home, work = next(fleet.assign(PROMPT, session))
        work.end()
        for number in range(3):
            fleet.stored(f"resp_{number}", home.replica)
        assert tables[0].replica("session a") == home.replica.url and len(tables[1]) == 1
        assert not fleet.is_away(Affinity(responses=("resp_2",)))
        await fleet.close()


async def test_requests_finish_on_a_replica_whose_address_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that drains is in no DNS any more."""
    monkeypatch.setattr(pool_module, "RESOLVE_SECONDS", 0.05)
    async with Bare(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{", hang_up=False) as bare:
        addresses = Changing([bare.url])
        async with running(addresses) as (fleet, _):
            rank, work = next(fleet.assign(PROMPT))
            replica = rank.replica
            connection = await replica.client.request(replica.client.head("POST", b"/v1/x", (), 0))
            addresses.urls = []
            await until(lambda: bare.url not in {replica.url for replica in fleet.replicas})
            assert not fleet.healthy
            await asyncio.sleep(0.2)
            bare.write(b"}")
            assert await connection.chunk() + await connection.chunk() == b"{}"
            replica.client.release(connection)
            work.end()
            await until(lambda: not connection.alive)


@pytest.mark.parametrize(
    ("sources", "place", "expected"),
    [
        (EventSources(port=5557), None, ("tcp://host:5557", "")),
        (EventSources(port=5557, replay_port=5560), 0, ("tcp://host:5557", "tcp://host:5560")),
        (EventSources(replay_port=5560), 0, ("", "")),
        (EventSources(("tcp://a:1", "tcp://b:2"), ("tcp://a:3", "tcp://b:4")), 1, ("tcp://b:2", "tcp://b:4")),
        (EventSources(("tcp://a:1",), replay_port=5560), 0, ("tcp://a:1", "")),
    ],
)
def test_where_events_come_from(sources: EventSources, place: int | None, expected: tuple[str, str]) -> None:
    assert sources.of("http://host:8000", place) == expected


def test_addresses_of_version_six_stay_whole() -> None:
    assert EventSources(port=5557, replay_port=9).of("http://[::1]:8000", None) == ("tcp://[::1]:5557", "tcp://[::1]:9")


async def test_cached_blocks_attract_requests_until_they_are_removed() -> None:
    sender = Sender()
    async with Bare(OK) as one, Bare(OK) as two:
        sources = EventSources((sender.endpoint, "tcp://127.0.0.1:9"), (sender.replay, "tcp://127.0.0.1:9"))
        async with running(Addresses((one.url, two.url)), sources) as (fleet, seen):
            await sender.send(stored([1, 2]))
            await until(lambda: fleet.index.blocks(0) == 2)
            for _ in range(5):
                rank, work = next(fleet.assign(PROMPT))
                assert rank.replica.url == one.url
                assert seen.overlaps[-1] == (0, 5, 4)
                work.end()
            await sender.send({"type": "AllBlocksCleared"})
            await until(lambda: fleet.index.blocks(0) == 0)
            chosen = set()
            for _ in range(20):
                rank, work = next(fleet.assign(PROMPT))
                chosen.add(rank.replica.number)
                work.end()
            assert chosen == {0, 1}
    await sender.close()


async def test_requests_go_to_the_data_parallel_rank_that_has_their_prompt() -> None:
    senders = await two_senders()
    async with (
        Bare(TWO_RANKS) as bare,
        running(Addresses((bare.url,)), EventSources((senders[0].endpoint,))) as (fleet, seen),
    ):
        for sender in senders:
            await sender.subscribed()
        (replica,) = fleet.replicas
        await senders[0].send(stored([1]))
        await senders[1].send(stored([1, 2]))
        await until(lambda: fleet.blocks(replica) == 3)
        assert fleet.index.overlaps(PROMPT.tokens) == {0: 2, 1: 4}
        rank, work = next(fleet.assign(PROMPT))
        assert (rank.replica, rank.wanted) == (replica, 1) and seen.overlaps[-1] == (0, 5, 4)
        assert replica.load.requests == 1 and replica.ranks[0].load.requests == 0
        others = [next(fleet.assign(RoutedPrompt([7] * 4, count=40))) for _ in range(3)]
        assert {rank.wanted for rank, _ in others} == {0, 1}, "unknown prompts go where there is less work"
        for _, assignment in [(rank, work), *others]:
            assignment.end()
        assert replica.load.tokens == 0
        await senders[1].send({"type": "AllBlocksCleared"})
        await until(lambda: fleet.blocks(replica) == 1)
        assert next(fleet.assign(PROMPT))[0].wanted == 0
        assert [request.split(b" ")[1] for request in bare.requests] == [b"/server_info"]
    for sender in senders:
        await sender.close()


async def test_numbers_of_ranks_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index has a bit for each, so they stay dense while replicas come and go."""
    monkeypatch.setattr(pool_module, "RESOLVE_SECONDS", 0.05)
    async with Bare(TWO_RANKS) as one, Bare(OK) as two, Bare(OK) as three:
        addresses = Changing([one.url, two.url])
        async with running(addresses, EventSources(port=1)) as (fleet, _):
            await until(lambda: sum(len(replica.ranks) for replica in fleet.replicas) == 3)
            assert {rank.number for replica in fleet.replicas for rank in replica.ranks} == {0, 1, 2}
            assert [[rank.wanted for rank in replica.ranks] for replica in fleet.replicas] == [[0, 1], [None]]
            addresses.urls = [two.url, three.url]
            await until(lambda: {replica.url for replica in fleet.replicas} == {two.url, three.url})
            assert {rank.number for replica in fleet.replicas for rank in replica.ranks} == {0, 1}


async def test_repeated_failures_lengthen_the_pause_of_a_replica() -> None:
    async with Bare(b"") as bare, running(Addresses((bare.url,))) as (fleet, _):
        pauses = []
        for _ in range(2):
            await until(lambda: fleet.healthy)
            rank, work = next(fleet.assign(PROMPT))
            replica = rank.replica
            began = asyncio.get_running_loop().time()
            with pytest.raises(ConnectionFailed):
                await replica.client.request(replica.client.head("POST", b"/v1/x", (), 0))
            replica.fail(ConnectionFailed("the test says so"))
            work.end()
            assert not fleet.healthy
            await until(lambda: fleet.healthy)
            pauses.append(asyncio.get_running_loop().time() - began)
        assert pauses[0] >= 0.4  # half a second, then a second, each 0.8 to 1.2 times as long
        assert pauses[1] >= 0.8


async def test_a_replica_that_dies_with_many_requests_has_failed_once() -> None:
    async with Bare(b"") as bare, running(Addresses((bare.url,))) as (fleet, _):
        (replica,) = fleet.replicas
        for _ in range(50):
            replica.fail(ConnectionFailed("the test says so"))
        assert not fleet.healthy
        async with asyncio.timeout(8):
            await until(lambda: fleet.healthy)
