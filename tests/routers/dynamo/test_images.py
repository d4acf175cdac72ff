"""Images of Dynamo's requests, without Dynamo: what a frontend carries from worker to worker is carried here."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from engine.errors import InvalidRequest
from engine.fake.encoder import HIDDEN_SIZE, PLACEHOLDER, FakeEncoder
from engine.kit.handoff import encode
from engine.media import MediaFiles, MediaSpans
from engine.replicas.encode_answers import EmbeddingStore, encode_info
from engine.transfer.arena import Arena
from multimodal.media.cache import EmbeddingCache
from multimodal.media.prompts import BackendPrompts, EncodedPrompts
from multimodal.request import MediaRef
from multimodal.text.control import ControlTokens
from multimodal.text.tokenizer import byte_tokenizer
from protocol.dynamo import DynamoExtras, DynamoPrefill, DynamoRequest
from routers.dynamo.handoffs import Claim
from routers.dynamo.images import ENCODING, BackendImages, GraphImages, OfferedEmbeddings
from tests.support.media import data_url, image_file, world
from tests.support.waiting import until

TOKENIZER = byte_tokenizer()
CONTROL = ControlTokens(TOKENIZER, TOKENIZER.special_texts)
URLS = [data_url(image_file()), data_url(image_file(size=(32, 32)))]
CHAT = f"<|im_start|>user\n{PLACEHOLDER}or{PLACEHOLDER}?<|im_end|>\n"


class Worker:
    """A worker's images, and what it offers to others; `calls` are claims of others' leases."""

    def __init__(self, prompts: EncodedPrompts, arena: Arena | None, inline_bytes: int, seconds: float) -> None:
        self.encoder = prompts.encoder
        self.prompts = prompts
        self.calls: list[Claim] = []
        self.giver: OfferedEmbeddings | None = None
        self.images = GraphImages(prompts, "m", "fake", arena, 5.0, give_up=self._give_up)
        store = EmbeddingStore(arena, inline_bytes, Mock())
        self.store = store
        info = encode_info("m", "fake", prompts.encoder.info)
        self.offered = OfferedEmbeddings(store, seconds, info, "ns.encode.lease", lambda: 42)

    async def _give_up(self, claim: Claim) -> None:
        self.calls.append(claim)
        assert self.giver is not None
        assert self.giver.free(claim.lease)


@asynccontextmanager
async def worker(
    arena: bool = True, rows: int = 4, inline_bytes: int = 0, seconds: float = 60.0
) -> AsyncIterator[Worker]:
    encoder = FakeEncoder(rows=rows)
    await encoder.start()
    async with world() as w:
        cache = EmbeddingCache(1 << 20, HIDDEN_SIZE)
        prompts = EncodedPrompts(encoder, w.loader, cache, TOKENIZER, CONTROL, 8)
        made = Worker(prompts, Arena(1 << 20) if arena else None, inline_bytes, seconds)
        yield made
        made.offered.close()
        await made.images.close()
    await encoder.close()


def asked(text: str = CHAT, urls: list[str] = URLS, **fields: Any) -> DynamoRequest:
    data = {"image_url": [{"Url": url} for url in urls]}
    return DynamoRequest(token_ids=TOKENIZER.encode(text), multi_modal_data=data, **fields)


def refs(urls: list[str] = URLS) -> list[MediaRef]:
    return [MediaRef(url, "auto", "messages") for url in urls]


async def tokenise(text: str) -> list[int]:
    return CONTROL.encode(text)


def embeddings(media: Any) -> list[bytes]:
    assert isinstance(media, MediaSpans)
    return [bytes(span.data) for span in media.spans]


async def test_prompts_are_those_of_our_own_http() -> None:
    async with worker() as here:
        expected = await here.prompts.prompt(CONTROL.mark(CHAT), refs(), tokenise, 1)
        found, encoded = await here.images.prompt(asked())
        assert found == expected and len(encoded) == 2
        assert isinstance(found.media, MediaSpans) and [span.rows for span in found.media.spans] == [4, 4]


@pytest.mark.parametrize("text", ["no image", PLACEHOLDER, PLACEHOLDER * 3])
async def test_each_image_needs_its_placeholder(text: str) -> None:
    async with worker() as here:
        with pytest.raises(InvalidRequest, match="for 2 images"):
            await here.images.prompt(asked(text))


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
async def test_images_are_encoded_once(inline_bytes: int) -> None:
    """What an encode worker has made is read from its answer, or from its memory, which is free afterwards."""
    async with worker(inline_bytes=inline_bytes) as there, worker() as here:
        here.giver = there.offered
        result = await there.offered.offer(await there.images.load(refs()))
        assert len(there.store.held) == (0 if inline_bytes else 1)
        found, encoded = await here.images.prompt(asked(encoder_result=result))
        expected, _ = await there.images.prompt(asked())
        assert found.ids == expected.ids and embeddings(found.media) == embeddings(expected.media)
        assert here.encoder.encoded == 0 and encoded == []  # type: ignore[attr-defined]
        await until(lambda: not there.store.held)
        assert [(claim.endpoint, claim.instance) for claim in here.calls] == [("ns.encode.lease", 42)] * (
            0 if inline_bytes else 1
        )
        result = await there.offered.offer(await there.images.load(refs()))
        again, _ = await here.images.prompt(asked(encoder_result=result))
        assert embeddings(again.media) == embeddings(found.media), "known by their keys"


async def test_decode_reads_the_images_that_prefill_has_encoded() -> None:
    async with worker() as prefill, worker() as decode:
        decode.giver = prefill.offered
        _, encoded = await prefill.images.prompt(asked(encoder_result={ENCODING: "AAAA"}))
        params = DynamoPrefill(disaggregated_params=await prefill.offered.offer(encoded))
        await decode.images.prompt(asked(encoder_result={ENCODING: "AAAA"}, prefill_result=params))
        assert (prefill.encoder.encoded, decode.encoder.encoded) == (2, 0)  # type: ignore[attr-defined]


async def test_images_that_cannot_be_read_are_encoded_here(caplog: pytest.LogCaptureFixture) -> None:
    async with worker() as there, worker(rows=5) as other, worker(arena=False) as blind, worker() as here:
        media = await there.images.load(refs())
        for reader, result in (
            (other, await there.offered.offer(media)),  # another encoder
            (blind, await there.offered.offer(media)),  # no way to the memory
            (here, await there.offered.offer(media[:1])),  # one of two
            (here, {ENCODING: "%"}),
            (here, {ENCODING: base64.b64encode(encode({"keys": 5})).decode()}),
        ):
            before = reader.encoder.encoded  # type: ignore[attr-defined]
            reader.prompts.cache = EmbeddingCache(0, HIDDEN_SIZE)
            await reader.images.prompt(asked(encoder_result=result))
            assert reader.encoder.encoded == before + 2  # type: ignore[attr-defined]
        assert caplog.text.count("images are encoded here") == 5


async def test_embeddings_that_nobody_reads_are_freed() -> None:
    async with worker(seconds=0.01) as there:
        await there.offered.offer(await there.images.load(refs()))
        await until(lambda: not there.store.held)


async def test_a_backend_of_its_own_gets_the_files() -> None:
    async with world() as w:
        images = BackendImages(BackendPrompts(w.loader, 8, None, CONTROL))
        request = asked(extra_args=DynamoExtras(formatted_prompt=CHAT))
        found, encoded = await images.prompt(request)
        assert isinstance(found.media, MediaFiles) and found.media.text == CHAT and not encoded
        assert [file.data for file in found.media.files] == [image_file(), image_file(size=(32, 32))]
        assert found.ids == request.token_ids
        with pytest.raises(InvalidRequest, match="rendered"):
            await images.prompt(asked())
        await asyncio.wait_for(images.close(), 5)
