"""Embeddings that stay with their encoder: who reads them, when the encoder hears of it, and what a loss costs."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from engine.base import DeltaStream
from engine.config import FakeConfig
from engine.errors import ContextOverflow, EmbeddingsLost, EngineDied, EngineFailure, InvalidRequest
from engine.fake.encoder import HIDDEN_SIZE, FakeEncoder
from engine.fake.engine import FakeEngine
from engine.media import EncodedMedia, MediaInput, MediaSpans, RemoteRows
from engine.transfer.base import LeaseWord
from engine.types import GenerateRequest
from multimodal.errors import RequestError
from multimodal.media.cache import EmbeddingCache
from multimodal.media.prompts import EncodedPrompts
from multimodal.metrics import GenerationMetrics
from multimodal.processor import Processor
from multimodal.request import Limits
from multimodal.text.control import ControlTokens
from multimodal.text.prompts import Prompts
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import byte_tokenizer
from tests.support.media import data_url, image_file, world
from tests.support.requests import ask_of, prepare
from tests.support.waiting import until


class Encoder(FakeEncoder):
    """Keeps embeddings that may stay."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, bytes] = {}
        self.asked: list[bool] = []
        self.released: list[tuple[int, bool]] = []
        self.dies = False
        self.copies = True

    async def encode(self, media: Sequence[MediaInput], prompt: str = "") -> list[EncodedMedia]:
        if self.dies:
            raise EngineDied("the encoder process was lost")
        if (rows := media[0].kept) is not None:
            if rows.offset not in self.kept or not self.copies:
                raise EngineFailure("they have been given up")
            return [EncodedMedia(text="", rows=1, dtype="float32", data=self.kept[rows.offset])]
        return [self._left(file, one) for file, one in zip(media, await super().encode(media), strict=True)]

    def release(self, rows: RemoteRows, *, lost: bool = False) -> None:
        self.released.append((rows.offset, lost))

    def _left(self, file: MediaInput, encoded: EncodedMedia) -> EncodedMedia:
        self.asked.append(file.stay)
        if not file.stay:
            return encoded
        offset = len(self.kept)
        self.kept[offset] = bytes(encoded.data)  # type: ignore[arg-type]
        return replace(encoded, data=b"", remote=RemoteRows((), offset, len(encoded.data), LeaseWord(0, 1)))


class Engine(FakeEngine):
    """Reads embeddings where the encoder has them."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(FakeConfig(token_delay=0.001))
        self._encoder = encoder
        self.read = 0

    def generate(self, request: GenerateRequest) -> DeltaStream:
        if request.has_remote:
            self.read += 1
            spans = []
            for span in request.spans:
                assert span.remote is not None
                if span.remote.offset not in self._encoder.kept:
                    return DeltaStream.failed(EmbeddingsLost("they are gone"))
                spans.append(replace(span, data=self._encoder.kept[span.remote.offset], remote=None))
            request = replace(request, media=MediaSpans(tuple(spans)))
        return super().generate(request)


@asynccontextmanager
async def served(*, stay: bool = True) -> AsyncIterator[tuple[Processor, Encoder, Engine]]:
    tokenizer, encoder = byte_tokenizer(), Encoder()
    engine = Engine(encoder)
    assert tokenizer.chat_template is not None
    control = ControlTokens(tokenizer, tokenizer.special_texts)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens, control)
    await engine.start()
    await encoder.start()
    async with world() as w:
        cache = EmbeddingCache(1 << 20, HIDDEN_SIZE)
        images = EncodedPrompts(encoder, w.loader, cache, tokenizer, control, 32, stay=stay)
        metrics = GenerationMetrics(CollectorRegistry(), "fake")
        yield Processor(engine, Prompts(tokenizer, template, images), Limits(), "fake", metrics), encoder, engine
    await engine.close()


def chat(index: int = 0, **fields: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": data_url(image_file(size=(32 + index, 32)))}}
    return {"messages": [{"role": "user", "content": [part]}], "max_tokens": 6, **fields}


def said(answer: bytes) -> str:
    content: str = json.loads(answer)["choices"][0]["message"]["content"]
    return content


async def answer(processor: Processor, body: dict[str, Any]) -> str:
    return said(await (await prepare(processor, body)).complete())


@pytest.fixture
async def expected() -> str:
    async with served(stay=False) as (processor, encoder, _):
        found = await answer(processor, chat())
        assert encoder.asked == [False] and not encoder.released
        return found


async def test_the_engine_reads_them_and_the_encoder_is_told_once(expected: str) -> None:
    async with served() as (processor, encoder, engine):
        assert await answer(processor, chat()) == expected
        await until(lambda: encoder.released == [(0, False)])
        encoder.kept.clear()
        assert await answer(processor, chat()) == expected, "the cache has a copy"
        assert encoder.asked == [True] and engine.read == 1 and len(encoder.released) == 1


async def test_what_is_lost_is_encoded_again_and_comes_here(expected: str) -> None:
    async with served() as (processor, encoder, engine):
        generation = await prepare(processor, chat())
        encoder.kept.clear()
        assert said(await generation.complete()) == expected
        assert encoder.asked == [True, False] and encoder.released == [(0, True)]
        assert await answer(processor, chat()) == expected
        assert len(encoder.asked) == 2 and engine.read == 1, "from the cache"
        assert b"choices" in await (await prepare(processor, chat(1))).complete()
        assert encoder.asked[2:] == [True], "others may still stay"
        await until(lambda: encoder.released[1:] == [(0, False)])


async def test_what_has_gone_since_it_was_cached_is_encoded_again(expected: str) -> None:
    async with served() as (processor, encoder, engine):
        encoder.copies = False
        for times in (1, 2):  # the cache knows where they are
            assert await answer(processor, chat()) == expected
            await until(lambda: len(encoder.released) == times)  # noqa: B023
            assert engine.read == times
        encoder.kept.clear()
        assert await answer(processor, chat()) == expected
        assert encoder.asked == [True, False] and encoder.released == [(0, False), (0, False), (0, True)]


async def test_all_choices_of_a_request_go_on_after_a_loss() -> None:
    async with served() as (processor, encoder, _):
        generation = await prepare(processor, chat(n=3))
        encoder.kept.clear()
        whole = await generation.complete()
        assert whole.count(b'"finish_reason"') == 3
        assert encoder.asked == [True, False], "encoded once for all"


async def test_an_encoder_that_fails_then_fails_the_request() -> None:
    async with served() as (processor, encoder, _):
        generation = await prepare(processor, chat())
        encoder.kept.clear()
        encoder.dies = True
        with pytest.raises(EngineDied):
            await generation.complete()


async def test_a_client_that_leaves_gives_them_up() -> None:
    async with served() as (processor, encoder, engine):
        async with aclosing((await prepare(processor, chat(max_tokens=1000))).stream()) as chunks:
            await anext(chunks)
        await until(lambda: encoder.released == [(0, False)])
        assert engine.healthy


async def test_prompts_that_no_engine_sees_leave_nothing_behind() -> None:
    async with served() as (processor, encoder, _):
        await processor.tokenize(ask_of(chat()))
        assert encoder.asked == [False] and not encoder.kept


async def test_a_request_that_is_refused_gives_them_up() -> None:
    """Whether its parameters are refused, or another of its images."""
    async with served() as (processor, encoder, engine):
        with pytest.raises(ContextOverflow):
            await prepare(processor, chat(max_tokens=1 << 30))
        await until(lambda: encoder.released == [(0, False)])

        async def refused(media: Sequence[MediaInput], prompt: str = "") -> list[EncodedMedia]:
            if media[0].kept is None and len(media[0].data) != len(image_file(size=(33, 32))):
                await until(lambda: len(encoder.kept) == 2)
                raise InvalidRequest("the image cannot be read", "image")
            return await Encoder.encode(encoder, media, prompt)

        encoder.encode = refused  # type: ignore[method-assign]
        body = chat(1)
        body["messages"][0]["content"] += chat(400)["messages"][0]["content"]
        with pytest.raises(RequestError, match="cannot be read"):
            await prepare(processor, body)
        await until(lambda: encoder.released == [(0, False), (1, False)])
        assert not engine.read
