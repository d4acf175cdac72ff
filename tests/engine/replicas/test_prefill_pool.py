"""Which prefill replica is asked: remembered prefixes and choice by cost; probes, and the frames of an answer."""

import asyncio
import gzip
import itertools
import socket
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest

from engine.errors import EngineFailure, EngineUnavailable
from engine.replicas import ask as client
from engine.replicas.prefill_pool import PrefillPool, Prefixes, prompt_keys
from protocol.frames import Frame, FrameReader, frame
from protocol.internal import PrefillInfo
from server.metrics.peers import PeerMetrics
from tests.support.disaggregated import (
    INFO,
    SECRET,
    all_of,
    answer_of,
    at_the_end,
    bare_peer,
    decode_engine,
    prefill_replica,
    replica_at,
    request,
    tokens_of,
)


def test_block_keys_name_whole_prefixes() -> None:
    prompt = tuple(range(100))

    def keys_of(prompt: tuple[int, ...], salt: str = "") -> list[int]:
        return prompt_keys(replace(request(prompt=prompt), cache_salt=salt), 32)

    keys = keys_of(prompt)
    assert len(keys) == 3 and len(keys_of(prompt[:96])) == 2 and keys_of(()) == []
    assert keys_of(prompt[:70]) == keys[:2]
    assert not set(keys) & set(keys_of(prompt, "salt"))
    assert not set(keys) & set(keys_of((1, *prompt[1:])))


def test_prefixes_are_bounded_and_their_ends_are_forgotten_first() -> None:
    prefixes = Prefixes(max_keys=4)
    prefixes.add([1, 2, 3])
    assert prefixes.known([1, 2, 9]) == 2 and prefixes.known([9, 2, 3]) == 0 and prefixes.known([]) == 0
    prefixes.add([5, 6])
    assert prefixes.known([1, 2, 3]) == 2 and prefixes.known([5, 6]) == 2
    prefixes.clear()
    assert prefixes.known([5]) == 0


@hypothesis.given(st.lists(st.tuples(st.binary(max_size=40), st.booleans())), st.data())
def test_frames_arrive_however_they_are_cut(parts: list[tuple[bytes, bool]], data: st.DataObject) -> None:
    stream = b"".join(frame(payload, failed=failed) for payload, failed in parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    reader = FrameReader(40)
    chunks = [stream[start:end] for start, end in itertools.pairwise([0, *cuts, len(stream)])]
    assert [found for chunk in chunks for found in reader.feed(chunk)] == [Frame(*part) for part in parts]


def test_a_frame_is_bounded() -> None:
    with pytest.raises(ValueError, match="41 bytes; the maximum is 40"):
        list(FrameReader(40).feed(frame(bytes(41))[:4]))


async def test_a_prompt_goes_where_its_prefix_is_unless_that_peer_is_busier_than_it_saves() -> None:
    async with (
        prefill_replica() as (one, _, _),
        prefill_replica() as (two, _, _),
        decode_engine([one, two]) as (engine, seen),
    ):
        shared = tuple(range(100, 420))
        for index in range(5):
            assert tokens_of(await all_of(engine, request(prompt=(*shared, 7 + index)))) == list(shared[:12])
        assert sorted(seen.by_peer.values()) == [5]
        await all_of(engine, request(prompt=tuple(range(10, 300))))
        assert sorted(seen.by_peer.values()) == [1, 5], "a new prompt goes to the one that was asked longest ago"
        home = replica_at(engine.pool, max(seen.by_peer, key=seen.by_peer.__getitem__))
        home.in_flight = 400
        await all_of(engine, request(prompt=(*shared, 7)))
        assert sorted(seen.by_peer.values()) == [2, 5]


async def test_prompt_logprobs_are_not_computed_from_cached_blocks_so_prefixes_do_not_count() -> None:
    async with (
        prefill_replica() as (one, _, _),
        prefill_replica() as (two, _, _),
        decode_engine([one, two]) as (engine, seen),
    ):
        for _ in range(2):
            await all_of(engine, request(prompt_logprobs=0))
        assert sorted(seen.by_peer.values()) == [1, 1]


async def test_a_peer_that_comes_back_is_asked_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    async with decode_engine([url], min_tokens=None) as (engine, seen):
        assert not engine.healthy and seen.peers == {url: False}
        async with bare_peer(port=port), asyncio.timeout(20):
            while not engine.healthy:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert seen.peers == {url: True}


NO_TEXT = msgspec.msgpack.encode(INFO).replace(b"fake", b"\xff\xff\xff\xff", 1)


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (answer_of(NO_TEXT), "does not say what it prefills with"),
        (answer_of(b"\xc1"), "does not say what it prefills with"),
        (answer_of(b'{"error":{"message":"\xff"}}', b"503 No"), "answered 503 and no error that can be read"),
        (
            answer_of(gzip.compress(bytes(10 << 20), mtime=0), headers=b"content-encoding: gzip\r\n"),
            "does not say what it prefills with",
        ),
        (answer_of(bytes(1 << 20)), "has no end, or makes no sense"),
        (b"nonsense\r\n\r\n", "cannot be reached"),
    ],
)
async def test_probes_continue_after_any_answer(probe: bytes, reason: str) -> None:
    async with bare_peer(probes=[probe]) as url, decode_engine([url], min_tokens=None) as (engine, seen):
        with pytest.raises(EngineUnavailable, match=reason):
            await all_of(engine, request())
        async with asyncio.timeout(20):
            while not engine.healthy:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert seen.peers == {url: True}


async def test_probes_continue_after_an_unexpected_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unthought(*_: Any) -> PrefillInfo:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr(client, "describe", unthought)
    async with bare_peer() as url, decode_engine([url], min_tokens=None) as (engine, _), asyncio.timeout(20):
        while not engine.healthy:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("folder", [False, True])
async def test_a_peer_that_is_gone_leaves_no_series(
    folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if folder:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    registry = CollectorRegistry()
    metrics = PeerMetrics(registry, "fake", "prefill")
    metrics.answered("http://staying", "ok", 0.1)
    async with prefill_replica() as (url, _, _):
        pool = PrefillPool([url], SECRET, 1, metrics)
        await pool.start()
        try:
            mine = replica_at(pool, url).info
            assert mine is not None
            (await pool.prefill(request(), mine, at_the_end)).close()
            page = generate_latest(registry).decode()
            assert (
                f'outcome="ok",peer="{url}"}} 1.0' in page
                and f'available{{model_name="fake",peer="{url}"}} 1.0' in page
            )
            (late,) = pool.replicas
            pool.update([])
            await asyncio.sleep(0.05)
            with pytest.raises(EngineFailure):  # as one that was with it when it went
                await late.ask([b"nonsense"], "late", 1)
        finally:
            await pool.close()
    page = generate_latest(registry).decode()
    assert url not in page and "http://staying" in page
