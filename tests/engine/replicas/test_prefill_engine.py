"""A decode engine before prefill replicas on real sockets, whole and when something breaks on the way."""

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from typing import Any

import pytest
from msgspec.structs import replace

from engine.errors import ContextOverflow, EngineNotReady, EngineUnavailable, InvalidRequest, QueueFull
from engine.fake.engine import FakeEngine
from engine.replicas import ask as client
from engine.replicas import replica as replica_module
from engine.types import Guide
from protocol.frames import frame
from tests.support.disaggregated import (
    CHUNKED,
    INFO,
    PROMPT,
    SOON,
    aggregated,
    all_of,
    answer_of,
    at_the_end,
    bare_peer,
    decode_engine,
    nothing,
    pair,
    prefill_replica,
    replica_at,
    request,
    stats_with,
    tokens_of,
)


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 30, "logprobs": 2},
        {"max_tokens": 1},
        {"max_tokens": 0, "prompt_logprobs": 1},
        {"max_tokens": 8, "prompt_logprobs": 0},
        {"stop_token_ids": (PROMPT[0],)},
        {"stop_token_ids": (PROMPT[3],)},
        {"min_tokens": 5, "stop_token_ids": PROMPT[:3]},
    ],
)
async def test_the_deltas_are_those_of_one_engine(sampling: dict[str, Any]) -> None:
    wanted = request(**sampling)
    async with pair() as (peer, engine, seen):
        said, whole = await all_of(engine, wanted), await aggregated(wanted)
        assert tokens_of(said) == tokens_of(whole)
        assert [entry for delta in said for entry in delta.logprobs] == [
            entry for delta in whole for entry in delta.logprobs
        ]
        assert (said[-1].finish_reason, said[-1].stop_reason) == (whole[-1].finish_reason, whole[-1].stop_reason)
        assert [delta.prompt is not None for delta in said] == [True] + [False] * (len(said) - 1)
        assert (
            said[0].prompt is not None
            and whole[0].prompt is not None
            and said[0].prompt.logprobs == whole[0].prompt.logprobs
        )
        assert all(delta.held is None for delta in said)
        await stats_with(peer, nothing)
        await stats_with(engine, nothing)
        assert seen.outcomes == {"ok": 1} and not seen.local


async def test_cached_tokens_are_those_of_prefill() -> None:
    async with pair() as (_, engine, _):
        for expected in (0, 64):
            report = (await all_of(engine, request()))[0].prompt
            assert report is not None and report.cached_tokens == expected


async def test_many_at_once_do_not_mix_and_leave_nothing() -> None:
    async with (
        prefill_replica() as (one, first, _),
        prefill_replica() as (two, second, _),
        decode_engine([one, two]) as (engine, seen),
    ):
        wanted = [request(str(index), tuple(range(10 + index, 60 + 2 * index)), max_tokens=20) for index in range(40)]
        said = await asyncio.gather(*(all_of(engine, each) for each in wanted))
        for each, deltas in zip(wanted, said, strict=True):
            assert tokens_of(deltas) == list(each.prompt_token_ids[:20])
        assert seen.outcomes == {"ok": 40} and min(seen.by_peer.values()) >= 10 and len(seen.by_peer) == 2
        for each_engine in (first, second, engine):
            await stats_with(each_engine, nothing)


async def test_an_invalid_request_is_refused_without_a_retry() -> None:
    async with (
        prefill_replica() as (one, _, _),
        prefill_replica() as (two, _, _),
        decode_engine([one, two]) as (engine, seen),
    ):
        with pytest.raises(InvalidRequest, match="from 0 to 511") as caught:
            await all_of(engine, request(prompt=(5, 600)))
        assert caught.value.param == "prompt"
        with pytest.raises(ContextOverflow):
            await all_of(engine, request(max_tokens=40_000))
        assert not seen.outcomes, "that can be told here"
        with pytest.raises(InvalidRequest, match="guided decoding") as caught:
            await all_of(engine, request(guide=Guide("json_object")))
        assert caught.value.param == "guide"
        assert seen.outcomes == {"invalid": 1} and seen.retries == 0 and all(seen.peers.values())


async def test_a_prompt_needs_no_room_at_prefill_for_what_decode_generates() -> None:
    async with pair({"max_seq_len": len(PROMPT) + 1}) as (peer, engine, seen):
        assert tokens_of(await all_of(engine, request())) == list(PROMPT[:12])
        assert seen.outcomes == {"ok": 1}
        await stats_with(peer, nothing)


async def test_a_prompt_that_does_not_fit_one_replica_goes_to_another() -> None:
    async with prefill_replica(max_seq_len=70) as (small, _, _), prefill_replica() as (large, _, _):
        async with decode_engine([small, large]) as (engine, seen):
            replica_at(engine.pool, large).last_asked = 1  # so that the other one is asked first
            assert tokens_of(await all_of(engine, request())) == list(PROMPT[:12])
            assert seen.outcomes == {"invalid": 1, "ok": 1} and not seen.local and all(seen.peers.values())
        async with decode_engine([small]) as (engine, seen):
            assert tokens_of(await all_of(engine, request())) == list(PROMPT[:12])
            assert seen.local == {"no_peer": 1}
        async with decode_engine([small], min_tokens=None) as (engine, _):
            with pytest.raises(ContextOverflow, match="exceed the 70 that fit"):
                await all_of(engine, request())


async def test_requests_too_long_for_decode_are_not_prefilled() -> None:
    async with pair(num_blocks=3) as (_, engine, seen):
        assert engine.info.capacity == 96
        with pytest.raises(ContextOverflow, match="70 prompt tokens and 27 output tokens exceed the 96 that fit"):
            await all_of(engine, request(max_tokens=27))
        assert not seen.outcomes
        assert len(tokens_of(await all_of(engine, request(max_tokens=26)))) == 26


async def test_short_prompts_and_those_without_a_peer_are_computed_here() -> None:
    async with bare_peer(info=replace(INFO, block_size=16)) as other, prefill_replica() as (url, _, _):
        async with decode_engine([url], min_tokens=71) as (engine, seen):
            assert tokens_of(await all_of(engine, request())) == list(PROMPT[:12])
            assert seen.local == {"short": 1} and not seen.outcomes
        async with decode_engine([other]) as (engine, seen):
            assert engine.healthy and tokens_of(await all_of(engine, request())) == list(PROMPT[:12])
            assert seen.local == {"no_peer": 1} and not seen.outcomes


async def test_log_probabilities_that_a_handoff_lacks_are_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FakeEngine.info.fget
    monkeypatch.setattr(FakeEngine, "info", property(lambda self: replace(original(self), handoff_logprobs=False)))
    async with prefill_replica() as (url, _, _):
        async with decode_engine([url]) as (engine, seen):
            assert tokens_of(await all_of(engine, request(logprobs=1))) == list(PROMPT[:12])
            assert seen.local == {"logprobs": 1} and not seen.outcomes
            assert tokens_of(await all_of(engine, request())) == list(PROMPT[:12]) and seen.outcomes == {"ok": 1}
        async with decode_engine([url], min_tokens=None) as (engine, _):
            with pytest.raises(InvalidRequest, match="PREFILL_FALLBACK") as caught:
                await all_of(engine, request(logprobs=1))
            assert caught.value.param == "logprobs"


async def test_replicas_that_differ_refuse_to_pair_and_name_both_values() -> None:
    async with (
        bare_peer(info=replace(INFO, block_size=16, dtype="float32")) as url,
        decode_engine([url], min_tokens=None) as (engine, _),
    ):
        assert not engine.healthy
        with pytest.raises(
            EngineUnavailable,
            match=r"has dtype float32, this replica has none; .* has block_size 16, this replica has 32",
        ):
            await all_of(engine, request())
    info = replace(INFO, tensor_parallel_size=2, kv_layout="8 layers of float8")
    async with bare_peer(info=info) as url, decode_engine([url], min_tokens=None) as (engine, _):
        expected = (
            "has tensor_parallel_size 2, this replica has 1; .* has kv_layout 8 layers of float8, this replica has none"
        )
        with pytest.raises(EngineUnavailable, match=expected):
            await all_of(engine, request())
    async with (
        prefill_replica(served_model_name="other") as (url, _, _),
        decode_engine([url], min_tokens=None) as (engine, _),
    ):
        with pytest.raises(EngineUnavailable, match="has model other, this replica has fake"):
            await all_of(engine, request())


async def test_without_the_secret_nothing_is_computed() -> None:
    async with (
        prefill_replica() as (url, peer, _),
        decode_engine([url], min_tokens=None, secret="wrong") as (engine, seen),
    ):
        with pytest.raises(EngineUnavailable, match="refuses: A valid API key is required"):
            await all_of(engine, request())
        assert (await stats_with(peer, nothing)).iteration == 0 and not seen.outcomes


@pytest.mark.parametrize(
    ("after", "outcome"),
    [
        (b"", "silent"),
        (CHUNKED + b"4\r\n\0\0\0\0\r\n", "silent"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "unreachable"),
        (CHUNKED + b"8\r\n" + frame(b"\xc1nop") + b"\r\n", "refused"),
        (CHUNKED + b"4\r\n\x7f\xff\xff\xff\r\n", "refused"),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\noops", "refused"),
    ],
)
async def test_a_peer_that_hangs_or_talks_nonsense_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, after: bytes, outcome: str
) -> None:
    monkeypatch.setattr(replica_module, "FIRST_PAUSE", 60.0)
    monkeypatch.setattr(client, "SILENCE_SECONDS", 1.0)
    async with bare_peer(after) as bad, prefill_replica() as (good, _, _), decode_engine([bad, good]) as (engine, seen):
        replica_at(engine.pool, good).last_asked = 1  # so that the other one is asked first
        assert tokens_of(await all_of(engine, request())) == list(PROMPT[:12])
        assert seen.outcomes == {outcome: 1, "ok": 1} and seen.retries == 1
        assert seen.peers == {bad: False, good: True}
        await all_of(engine, request())
        assert seen.outcomes["ok"] == 2 and seen.retries == 1, "it is not asked again until a probe succeeds"


@pytest.mark.parametrize(
    ("status", "code", "outcome", "blamed"),
    [
        (413, "request_too_large", "invalid", False),
        (408, "request_timeout", "failed", False),
        (431, "headers_too_large", "failed", False),
        (400, "malformed_request", "failed", False),
        (429, "queue_full", "unavailable", False),
        (401, "invalid_api_key", "refused", True),
        (404, "unknown_url", "refused", True),
        (409, "replicas_differ", "refused", True),
        (502, "bad_gateway", "refused", True),
    ],
)
async def test_only_what_is_wrong_with_a_peer_opens_its_breaker(
    status: int, code: str, outcome: str, blamed: bool
) -> None:
    error = json.dumps({"error": {"message": "no", "type": "some_error", "code": code}}).encode()
    async with bare_peer(answer_of(error, b"%d No" % status)) as bad, decode_engine([bad]) as (engine, seen):
        assert tokens_of(await all_of(engine, request())) == list(PROMPT[:12])
        assert seen.outcomes == {outcome: 1} and seen.local == {"no_peer": 1}
        assert seen.peers == {bad: not blamed}


async def test_clients_learn_what_is_wrong_and_the_log_where(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with bare_peer(info=replace(INFO, dtype="float32")) as other, bare_peer(b"nonsense\r\n\r\n") as bad:
        async with decode_engine([bad, other, "http://127.0.0.1:1"], min_tokens=None) as (engine, _):
            for expected in ("a prefill replica cannot be reached", "one has dtype float32, this replica has none"):
                with pytest.raises(EngineUnavailable) as caught:
                    await all_of(engine, request())
                assert expected in str(caught.value) and "127.0.0.1" not in str(caught.value)
        assert other in caplog.text and "Connect call failed" in caplog.text


async def test_attempts_are_bounded_and_a_full_queue_is_no_illness() -> None:
    settings = {"max_batch_size": 1, "max_queue_size": 0}
    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(prefill_replica(**settings)) for _ in range(3)]
        engine, seen = await stack.enter_async_context(
            decode_engine([url for url, _, _ in peers], min_tokens=None, attempts=2)
        )
        held = [peer.generate(replace(request(), prefill_only=True)) for _, peer, _ in peers]
        for stream in held:
            await anext(stream)
        with pytest.raises(QueueFull):
            await all_of(engine, request())
        assert seen.outcomes == {"unavailable": 2} and seen.retries == 1 and all(seen.peers.values())
        for stream in held:
            await stream.aclose()
        assert tokens_of(await all_of(engine, request())) == list(PROMPT[:12])


async def test_a_draining_replica_finishes_its_hand_overs_and_gets_no_more() -> None:
    async with prefill_replica() as (url, peer, replica), decode_engine([url], min_tokens=None) as (engine, _):
        lease = await engine.pool.prefill(request(), engine.common, at_the_end)
        replica.draining = True
        with pytest.raises(EngineNotReady, match="shutting down"):
            await all_of(engine, request())
        await asyncio.sleep(0.1)
        assert replica.running == 1 and (await stats_with(peer, lambda stats: True)).num_held_requests == 1
        lease.close()
        await stats_with(peer, nothing, SOON)
        while replica.running:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
