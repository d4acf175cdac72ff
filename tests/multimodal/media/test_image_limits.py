"""Bounds on what a chat with images costs other requests: turns, time, memory, and work for refused requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from engine.config import FakeConfig
from engine.errors import QueueFull
from engine.fake.encoder import HIDDEN_SIZE, FakeEncoder
from engine.fake.engine import FakeEngine
from multimodal.errors import DeadlineExceeded, RequestError
from multimodal.media import prompts as media_prompts
from multimodal.media.cache import EmbeddingCache
from multimodal.media.limits import MAX_REQUEST_PIXELS
from multimodal.media.prompts import EncodedPrompts
from multimodal.metrics import GenerationMetrics
from multimodal.processor import Processor
from multimodal.request import Limits
from multimodal.text.control import ControlTokens
from multimodal.text.prompts import Prompts
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import byte_tokenizer
from tests.support.disaggregated import replica
from tests.support.media import OddServer, data_url, image_file, ok, world
from tests.support.requests import ask_of, prepare
from tests.support.waiting import until

PNG, OTHER = image_file(), image_file(size=(32, 32))


@asynccontextmanager
async def processor(
    encoder: FakeEncoder, max_pixels: int = MAX_REQUEST_PIXELS, **limits: Any
) -> AsyncIterator[tuple[Processor, OddServer]]:
    """A processor with images, and the one server of all that it fetches."""
    tokenizer, engine = byte_tokenizer(), FakeEngine(FakeConfig())
    assert tokenizer.chat_template is not None
    control = ControlTokens(tokenizer, tokenizer.special_texts)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens, control)
    await engine.start()
    await encoder.start()
    async with world() as w:
        cache = EmbeddingCache(1 << 20, HIDDEN_SIZE)
        images = EncodedPrompts(encoder, w.loader, cache, tokenizer, control, 32, max_pixels)
        prompts = Prompts(tokenizer, template, images)
        yield (
            Processor(engine, prompts, Limits(**limits), "fake", GenerationMetrics(CollectorRegistry(), "fake")),
            w.server,
        )
    await engine.close()


def chat(*urls: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": parts}], **fields}


async def test_images_from_slow_servers_do_not_delay_other_requests() -> None:
    async with world(concurrency=1) as w:
        asked, going_on = asyncio.Event(), asyncio.Event()

        async def hold_back(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await going_on.wait()
            writer.write(ok(PNG))

        w.server.answers["/"] = hold_back
        slow = asyncio.create_task(w.loader.load("http://images.test/"))
        await asked.wait()
        async with asyncio.timeout(20):
            assert (await w.loader.load(data_url(PNG))).data == PNG
        assert not slow.done()
        going_on.set()
        assert (await slow).data == PNG


async def test_the_deadline_counts_while_images_are_encoded() -> None:
    encoder = FakeEncoder(seconds=30.0)
    async with processor(encoder, request_timeout_seconds=0.1) as (prepared, _):
        body = chat(data_url(PNG))
        with pytest.raises(DeadlineExceeded, match=r"longer than the 0\.1 seconds"):
            await prepare(prepared, body)
        with pytest.raises(DeadlineExceeded):
            await prepared.tokenize(ask_of(body))
        assert idle(encoder)


def idle(encoder: FakeEncoder) -> bool:
    return not encoder._running


async def test_images_that_wait_to_be_encoded_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_prompts, "MAX_WAITING", len(PNG) + len(OTHER) - 1)
    encoder = FakeEncoder(seconds=0.2)
    async with processor(encoder) as (prepared, _):
        first = asyncio.create_task(prepare(prepared, chat(data_url(PNG))))
        await until(lambda: not idle(encoder))
        with pytest.raises(QueueFull):
            await prepare(prepared, chat(data_url(OTHER)))
        await asyncio.gather(first, prepare(prepared, chat(data_url(PNG))))  # what is on its way needs no more
        await prepare(prepared, chat(data_url(OTHER)))
        assert encoder.encoded == 2


async def test_a_client_that_goes_leaves_no_images_behind() -> None:
    async with (
        replica("aggregated", fake_token_delay_ms=60_000) as (url, life),
        httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(20, read=0.5)) as client,
    ):
        for path in ("/v1/chat/completions", "/tokenize"):
            with pytest.raises(httpx.ReadTimeout):
                await client.post(path, json=chat(data_url(PNG)))
            await until(lambda: not life.running)


async def test_nothing_is_fetched_for_a_request_with_too_many_choices() -> None:
    async with processor(FakeEncoder(), max_n=4) as (prepared, server):
        server.answers["/"] = ok(PNG)
        with pytest.raises(RequestError):
            await prepare(prepared, chat("http://images.test/", n=5))
        assert not server.requests
        await prepare(prepared, chat("http://images.test/", n=4))
        assert server.requests == {"/": 1}


async def test_the_pixels_of_a_request_are_limited_and_one_image_is_always_taken() -> None:
    encoder = FakeEncoder()
    async with processor(encoder, max_pixels=64 * 48 + 32 * 32 - 1) as (made, server):
        server.answers |= {"/a.png": ok(PNG), "/b.png": ok(OTHER)}
        one, other = "http://images.test/a.png", data_url(OTHER)
        with pytest.raises(
            RequestError, match="4096 pixels or more; those of a request may have 4095 in all"
        ) as caught:
            await prepare(made, chat(one, other))
        assert caught.value.code == "too_many_pixels"
        await prepare(made, chat(one))
    async with processor(FakeEncoder(), max_pixels=1) as (made, server):
        server.answers["/a.png"] = ok(PNG)
        await prepare(made, chat(one))
