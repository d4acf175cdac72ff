"""The pool of any kind of replicas: discovery, probes, pauses after failures, and trying in turn."""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineNotReady
from engine.replicas import pool as pool_module
from engine.replicas.client import ConnectionFailed
from engine.replicas.discovery import Addresses
from engine.replicas.pool import ReplicaPool
from engine.replicas.prefill_pool import PrefillPool
from engine.replicas.replica import Replica
from tests.support.disaggregated import INFO, SECRET, Seen
from tests.support.waiting import until

ONE, TWO, THREE = (f"http://10.0.0.{number}:1" for number in (1, 2, 3))


class Probed(Replica):
    """A replica that is as the test says."""

    probe_seconds = 0.05

    def __init__(self, url: str) -> None:
        super().__init__(url, f"test replica {url}")
        self.probes = 0
        self.problem: Exception | None = None

    async def probe(self) -> None:
        self.probes += 1
        if self.problem is not None:
            raise self.problem


class Pool(ReplicaPool[Probed]):
    problem: Exception | None = None
    """What is wrong with new replicas."""

    def _new(self, url: str) -> Probed:
        replica = Probed(url)
        replica.problem = self.problem
        return replica

    def at(self, url: str) -> Probed:
        return next(replica for replica in self.replicas if replica.url == url)

    def asked(self) -> list[str]:
        """Replicas that are tried for one request, if each fails."""
        tried = self.in_turn(
            lambda one: one.available, lambda candidates: min(candidates, key=lambda one: one.last_asked)
        )
        return [replica.url for replica in tried]


class Retries:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def retried(self) -> None:
        self.counts["retried"] += 1


@asynccontextmanager
async def pool_of(*urls: str, attempts: int = 3) -> AsyncIterator[tuple[Pool, Retries]]:
    observer = Retries()
    pool = Pool(Addresses(urls), attempts, observer)
    await pool.start()
    try:
        yield pool, observer
    finally:
        await pool.close()


async def test_replicas_are_tried_in_turn_and_no_more_than_wanted() -> None:
    async with pool_of(ONE, TWO, THREE, attempts=2) as (pool, observer):
        assert pool.counts == (3, 3)
        assert [pool.asked(), pool.asked(), pool.asked()] == [[ONE, TWO], [THREE, ONE], [TWO, THREE]]
        assert observer.counts["retried"] == 3
        pool.at(ONE).problem = EngineNotReady("shutting down")
        await until(lambda: pool.counts == (3, 2))
        assert ONE not in pool.asked()
        assert pool.at(ONE).reason == "shutting down"


async def test_a_replica_that_failed_is_neither_asked_nor_probed_for_a_while() -> None:
    async with pool_of(ONE) as (pool, _):
        replica = pool.at(ONE)
        probes, failed = replica.probes, time.monotonic()
        for _ in range(20):
            replica.fail(ConnectionFailed("the connection was lost"))
        pause = replica.breaker.pause
        assert 0.3 < pause < 0.7, "it has failed once"
        assert pool.asked() == []
        await until(lambda: replica.probes > probes)
        assert time.monotonic() - failed >= pause
        await until(lambda: pool.asked())


def test_a_line_of_the_log_on_one_replica_says_everything_once(caplog: pytest.LogCaptureFixture) -> None:
    for error, cause, said in (
        (EngineNotReady("one answers 503"), None, "it answers 503"),
        (ConnectionFailed("cannot connect: [Errno 111] x"), OSError(111, "x"), "cannot connect: [Errno 111] x"),
        (ConnectionFailed("cannot connect: timeout"), TimeoutError(), "cannot connect: timeout"),
        (EngineNotReady("one is odd"), ValueError("3"), "it is odd (ValueError('3'))"),
    ):
        error.__cause__ = cause
        Probed(ONE).set_unready(error)
        assert caplog.messages[-1] == f"test replica {ONE}: {said}"


async def test_a_pool_without_a_ready_replica_says_whom_it_asked_and_why_in_vain(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log names addresses and details; clients are told neither."""
    monkeypatch.setattr(Pool, "problem", ConnectionFailed("cannot connect: nobody listens at 10.0.0.1"))
    async with pool_of(ONE, TWO) as (pool, _):
        said = [f"test replica {url}: cannot connect: nobody listens at 10.0.0.1" for url in (ONE, TWO)]
        assert [record.message for record in caplog.records] == [*said, "no replica is ready yet, of 2"]
        assert pool.missing == "No replica is ready, of 2: each of 2 cannot be reached."
        pool.at(TWO).problem = EngineNotReady("one is full")
        await until(lambda: "full" in pool.missing)
        assert pool.missing == "No replica is ready, of 2: one cannot be reached; one is full."
        pool.at(ONE).problem = None
        await until(lambda: not pool.missing)
    async with pool_of() as (pool, _):
        assert "no replica is ready yet, of 0" in caplog.text
        assert pool.missing == "No replica is known."


async def test_a_failure_and_a_recovery_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with pool_of(ONE) as (pool, _):
        replica = pool.at(ONE)
        for problem in (ConnectionFailed("it hung up"), None):
            replica.problem = problem
            probes = replica.probes
            await until(lambda probes=probes: replica.probes >= probes + 4)
        lines = [
            f"test replica {ONE} is ready",
            f"test replica {ONE}: it hung up",
            f"test replica {ONE} is ready again",
        ]
        assert caplog.messages == lines


async def test_a_name_that_does_not_resolve_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    answers: list[Any] = [OSError("no such name"), OSError("no such name"), [(0, 0, 0, "", ("10.0.0.1", 1))], []]

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return list(answer)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    addresses = Addresses(("dns+http://one:1",), "encode")
    assert [await addresses.find(set()) for _ in range(4)] == [[], [], [ONE], []]
    assert caplog.messages == [
        "cannot resolve one, the name of encode replicas: no such name",
        "one, the name of encode replicas, resolves now",
    ]


async def test_a_bug_in_a_probe_is_not_the_end_of_probes() -> None:
    async with pool_of(ONE) as (pool, _):
        replica = pool.at(ONE)
        replica.problem = RuntimeError("a bug")
        await until(lambda: not replica.available)
        assert replica.reason == "a probe failed: RuntimeError"
        replica.problem = None
        await until(lambda: replica.available)


async def test_a_replica_that_leaves_is_neither_asked_nor_probed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with pool_of(ONE, TWO) as (pool, _):
        gone = pool.at(ONE)
        pool.update([TWO, THREE])
        assert f"removed test replica {ONE}: no longer in DNS or its file" in caplog.text
        await until(lambda: pool.counts == (2, 2))
        assert not gone.available and ONE not in pool.asked()
        await asyncio.sleep(0.15)
        probes = gone.probes
        await asyncio.sleep(0.2)
        assert gone.probes == probes


async def test_a_name_becomes_its_addresses() -> None:
    addresses = Addresses(("http://fixed:1/", "dns+http://localhost:8000"))
    assert addresses.change
    found = await addresses.find(set())
    assert found[0] == "http://fixed:1"
    assert "http://127.0.0.1:8000" in found or "http://[::1]:8000" in found
    unknown = Addresses(("dns+http://no-such-name.invalid:8000",))
    assert await unknown.find({"http://10.0.0.1:8000"}) == ["http://10.0.0.1:8000"]


async def test_a_file_has_a_replica_on_each_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "replicas"
    addresses = Addresses(("http://fixed:1", file.as_uri()))
    assert addresses.change
    assert [await addresses.find({ONE}) for _ in range(2)] == [["http://fixed:1", ONE]] * 2
    assert len(caplog.messages) == 1 and "cannot read" in caplog.messages[0]
    file.write_text(f"{TWO}/\n\n# {THREE}\n{THREE}\n")
    assert await addresses.find({ONE}) == ["http://fixed:1", TWO, THREE]
    file.write_text("")
    assert await addresses.find({TWO}) == ["http://fixed:1"]


async def test_names_stand_for_all_their_addresses_and_are_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "RESOLVE_SECONDS", 0.05)
    addresses: list[str] | None = ["127.0.0.1", "::1"]

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert host == "prefill"
        if addresses is None:
            raise socket.gaierror("try again")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    pool = PrefillPool(["dns+http://prefill:1", "http://10.0.0.1:2"], SECRET, 1, Seen())
    monkeypatch.setattr(pool_module, "FIRST_PROBE_SECONDS", 0.1)
    await pool.start()

    async def until(urls: set[str]) -> None:
        async with asyncio.timeout(20):
            while {replica.url for replica in pool.replicas} != urls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    try:
        await until({"http://127.0.0.1:1", "http://[::1]:1", "http://10.0.0.1:2"})
        addresses = ["127.0.0.2"]
        await until({"http://127.0.0.2:1", "http://10.0.0.1:2"})
        addresses = None
        await asyncio.sleep(0.2)
        assert pool.counts == (2, 0) and not pool.healthy(INFO), "what was known last stays"
    finally:
        await pool.close()
