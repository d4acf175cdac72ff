"""Prompts with images, prefilled elsewhere: the requests to each replica, and lost KV blocks."""

import logging
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from engine.admission import AdmissionEngine
from engine.base import DeltaStream
from engine.errors import EngineUnavailable, InvalidRequest
from engine.kit.handoff import VERSION, handoff_of
from engine.kit.handoff import encode as encode_handoff
from engine.media import MediaFiles, MediaInput, MediaSpan, MediaSpans
from engine.replicas.prefill_engine import DisaggregatedEngine
from engine.replicas.prefill_pool import prompt_keys
from engine.transfer.shared_bytes import SharedBytes
from engine.types import Delta, GenerateRequest, Held
from protocol.frames import frame
from tests.support.disaggregated import (
    CHUNKED,
    PROMPT,
    aggregated,
    all_of,
    answer_of,
    bare_peer,
    decode_engine,
    nothing,
    pair,
    request,
    stats_with,
    tokens_of,
)

SIZE = 1 << 20


def image(key: str, start: int, length: int = 8, size: int = 64) -> MediaSpan:
    return MediaSpan(key=key * 64, start=start, length=length, rows=length, dtype="float32", data=key.encode() * size)


def showing(*keys: str, size: int = 64, **sampling: Any) -> GenerateRequest:
    """A prompt with images one behind the other."""
    images = tuple(image(key, 20 + 10 * index, size=size) for index, key in enumerate(keys))
    return replace(request(**{"max_tokens": 20, **sampling}), media=MediaSpans(images))


def shared(image: MediaSpan) -> MediaSpan:
    return replace(image, data=SharedBytes.of(image.data))  # type: ignore[arg-type]


class Asked:
    """The requests that an engine got."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[GenerateRequest] = []
        original = engine.generate

        def generate(request: GenerateRequest) -> DeltaStream:
            self.requests.append(request)
            stream: DeltaStream = original(request)
            return stream

        monkeypatch.setattr(engine, "generate", generate)


def asked(peer: AdmissionEngine, engine: DisaggregatedEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[Asked, Asked]:
    """At prefill, and by the local engine of decode."""
    return Asked(peer, monkeypatch), Asked(engine.inner, monkeypatch)


async def test_embeddings_go_to_prefill_and_stay_with_decode_which_may_have_to_compute_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as (peer, engine, seen):
        there, here = asked(peer, engine, monkeypatch)
        answers = []
        for keys in ("ab", "ba", "a"):
            wanted = showing(*keys)
            answers.append(tokens_of(await all_of(engine, wanted)))
            assert answers[-1] == tokens_of(await aggregated(wanted))
            assert there.requests[-1].spans == wanted.spans
            assert here.requests[-1].spans == wanted.spans
            assert here.requests[-1].handoff is not None
        assert len({tuple(answer) for answer in answers}) == 3
        await stats_with(peer, nothing)
        await stats_with(engine, nothing)
        assert seen.outcomes == {"ok": 3} and not seen.local


@pytest.mark.parametrize("share", [False, True])
async def test_embeddings_of_many_megabytes(share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (peer, engine, seen):
        there, _ = asked(peer, engine, monkeypatch)
        wanted = showing("a", "b", "c", "d", size=8 * SIZE)
        given = replace(wanted, media=MediaSpans(tuple(map(shared, wanted.spans)))) if share else wanted
        assert tokens_of(await all_of(engine, given)) == tokens_of(await aggregated(wanted))
        assert there.requests[0].spans == wanted.spans and seen.outcomes == {"ok": 1}


async def test_more_than_prefill_takes_is_computed_here() -> None:
    async with pair({"max_body_mb": 1.0, "max_images": 0}) as (_, engine, seen):
        wanted = showing("a", size=SIZE)
        assert tokens_of(await all_of(engine, wanted)) == tokens_of(await aggregated(wanted))
        assert seen.outcomes == {"invalid": 1} and seen.local == {"no_peer": 1} and all(seen.peers.values())


async def test_without_a_peer_the_embeddings_are_used_here(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = showing("a", "b")
    async with decode_engine(["http://127.0.0.1:1"]) as (engine, seen):
        here = Asked(engine.inner, monkeypatch)
        assert tokens_of(await all_of(engine, wanted)) == tokens_of(await aggregated(wanted))
        assert here.requests[0].spans == wanted.spans and seen.local == {"no_peer": 1}


async def test_short_prompts_with_images_are_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(min_tokens=len(PROMPT) + 1) as (_, engine, seen):
        wanted = showing("a")
        assert tokens_of(await all_of(engine, wanted)) == tokens_of(await aggregated(wanted))
        assert seen.local == {"short": 1}, "the images' tokens are among the prompt's"


async def test_a_prompt_that_the_backend_expands_is_never_short() -> None:
    media = replace(request(), media=MediaFiles("", (MediaInput(b"file"),)))
    async with pair(min_tokens=len(PROMPT) + 1) as (_, engine, seen):
        with pytest.raises(InvalidRequest, match="as embeddings alone"):  # which is prefill's word
            await all_of(engine, media)
        assert seen.outcomes == {"invalid": 1} and not seen.local


def peer_with(wanted: GenerateRequest, state: bytes, first: int) -> bytes:
    """The answer of a prefill replica that ends its lease at once."""
    handed = encode_handoff(handoff_of("fake", Delta((first,), held=Held(state))))
    body = frame(handed)
    return CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize("sampling", [{}, {"min_tokens": 5}])
async def test_lost_blocks_are_computed_here_with_the_embeddings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sampling: dict[str, Any]
) -> None:
    caplog.set_level(logging.WARNING)
    wanted = showing("a", "b", **sampling)
    whole = tokens_of(await aggregated(wanted))
    async with bare_peer(peer_with(wanted, b"not its own", whole[0])) as url, decode_engine([url]) as (engine, seen):
        here = Asked(engine.inner, monkeypatch)
        assert tokens_of(await all_of(engine, wanted)) == whole
        assert [each.spans for each in here.requests] == [wanted.spans] * 2
        assert here.requests[1].handoff is not None and not here.requests[1].handoff.state
        assert seen.local == {"lost": 1}
        await stats_with(engine, nothing)


async def test_blocks_that_were_not_handed_over_are_computed_from_the_embeddings() -> None:
    wanted = showing("a")
    whole = tokens_of(await aggregated(wanted))
    async with bare_peer(peer_with(wanted, b"", whole[0])) as url, decode_engine([url]) as (engine, seen):
        assert tokens_of(await all_of(engine, wanted)) == whole
        assert not seen.local


async def test_wrong_spans_are_refused_before_a_peer_is_asked() -> None:
    async with pair() as (_, engine, seen):
        for images in ((image("a", 65),), (image("a", 20), image("b", 25)), (image("b", 30), image("a", 20))):
            with pytest.raises(InvalidRequest) as caught:
                await all_of(engine, replace(request(), media=MediaSpans(images)))
            assert caught.value.param == "prompt"
        assert not seen.outcomes


async def test_an_error_of_prefill_about_an_image_reaches_the_user() -> None:
    error = msgspec.json.encode(
        {"error": {"message": "this model takes no images", "type": "invalid_request_error", "param": "prompt"}}
    )
    async with bare_peer(answer_of(error, b"400 Bad Request")) as url, decode_engine([url]) as (engine, seen):
        with pytest.raises(InvalidRequest, match="takes no images"):
            await all_of(engine, showing("a"))
        assert seen.outcomes == {"invalid": 1}


async def test_a_refusal_to_compute_without_a_peer_stands() -> None:
    async with decode_engine(["http://127.0.0.1:1"], min_tokens=None) as (engine, _):
        with pytest.raises(EngineUnavailable):
            await all_of(engine, showing("a"))


async def test_cached_prefixes_are_those_of_equal_images() -> None:
    async with pair() as (_, engine, _):
        for keys, expected in (("a", 0), ("a", 64), ("b", 0), ("a", 64)):
            report = (await all_of(engine, showing(*keys)))[0].prompt
            assert report is not None and report.cached_tokens == expected


def test_block_keys_of_prompts_depend_on_their_images() -> None:
    def keys_of(*spans: MediaSpan) -> list[int]:
        return prompt_keys(replace(request(), media=MediaSpans(spans)), 32)

    plain = keys_of()
    one, other, moved = keys_of(image("a", 40)), keys_of(image("b", 40)), keys_of(image("a", 41, 7))
    assert plain[0] == one[0] == other[0] == moved[0] and len({plain[1], one[1], other[1], moved[1]}) == 4
    assert keys_of(image("a", 40)) == one and VERSION == 1
