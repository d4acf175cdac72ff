"""Conformance of every engine that takes embeddings of images (`engine/base.py`)."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from engine.base import DeltaStream, Engine
from engine.config import EmbeddedConfig
from engine.errors import EngineUnavailable, InvalidRequest
from engine.kit import handoff
from engine.kv_events import Stored
from engine.media import Encoding, MediaFiles, MediaInput, MediaSpan, MediaSpans, PromptMedia
from engine.types import Delta, GenerateRequest, Handoff
from tests.support.engine_cases import (
    BLOCK,
    IMAGE_TOKEN,
    ROWS,
    TAKING_IMAGES,
    Subject,
    config_of,
    engine_of,
    generate,
    idle,
    prompt_of,
    request_for,
    showing,
    tokens_of,
)
from tests.support.vision_models import build_llava

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_llava(tmp_path_factory.mktemp("llava"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=TAKING_IMAGES)
async def subject(request: pytest.FixtureRequest, vision_model: Path) -> AsyncIterator[Subject]:
    config = config_of(request.param, vision_model)
    if isinstance(config, EmbeddedConfig):  # not rounded: the engine in a process of its own runs transformers here
        config = replace(config, model=str(vision_model))
    async with engine_of(request.param, config) as engine:
        await engine.start()
        subject = Subject(engine)
        collecting = asyncio.create_task(subject.collect_events())
        yield subject
        await engine.close()
        await asyncio.wait_for(collecting, 20)


@pytest.fixture
def engine(subject: Subject) -> Engine:
    return subject.engine


def without_data(spans: tuple[MediaSpan, ...]) -> MediaSpans:
    """As the seam allows them where the keys and values of their tokens are read."""
    return MediaSpans(tuple(replace(span, data=b"") for span in spans))


def said(deltas: list[Delta]) -> list[tuple[int, float]]:
    """Tokens and their log-probabilities."""
    return [(entry[0].token_id, entry[0].logprob) for delta in deltas for entry in delta.logprobs]


def near(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> bool:
    """Whether answers are equal but for rounding, which depends on what is computed together."""
    return all((a[0], a[1]) == (b[0], pytest.approx(b[1], abs=1e-4)) for a, b in zip(one, other, strict=True))


async def prefill(engine: Engine, request: GenerateRequest) -> tuple[Handoff, DeltaStream]:
    stream = engine.generate(replace(request, prefill_only=True, request_id=f"{request.request_id}-prefill"))
    return handoff.decode_handoff(handoff.encode(handoff.handoff_of(engine.info.backend, await anext(stream)))), stream


async def test_another_image_gives_another_answer(engine: Engine) -> None:
    before, after = prompt_of(7), prompt_of(9)
    red, blue, again = [
        await generate(engine, showing(before, seed, after, max_tokens=12, logprobs=0)) for seed in (1, 2, 1)
    ]
    assert near(said(red), said(again)) and len(said(red)) == 12
    assert not near(said(red), said(blue))


async def test_the_order_of_images_is_theirs(engine: Engine) -> None:
    texts = [prompt_of(3) for _ in range(3)]
    orders = [(1, 2), (2, 1), (1, 1)]
    answers = [
        said(await generate(engine, showing(texts[0], a, texts[1], b, texts[2], max_tokens=16, logprobs=0)))
        for a, b in orders
    ]
    assert not any(near(one, other) for one, other in itertools.combinations(answers, 2))


async def test_many_at_once_do_not_mix(engine: Engine) -> None:
    texts = [prompt_of(length) for length in range(3, 23)]
    alone = [tokens_of(await generate(engine, showing(text, 1 + index % 3, text))) for index, text in enumerate(texts)]
    requests = [showing(text, 1 + index % 3, text) for index, text in enumerate(texts)]
    together = await asyncio.gather(*(generate(engine, request) for request in requests))
    assert [tokens_of(deltas) for deltas in together] == alone


async def test_only_blocks_of_equal_images_are_reused(engine: Engine) -> None:
    before, after = prompt_of(BLOCK + 4), prompt_of(2 * BLOCK)

    async def cached(seed: int, text: tuple[int, ...] = before) -> int:
        report = (await generate(engine, showing(text, seed, after)))[0].prompt
        assert report is not None
        return report.cached_tokens

    whole = (len(before) + ROWS + len(after)) // BLOCK * BLOCK
    assert await cached(1) == 0
    assert await cached(1) == whole
    assert await cached(2) == BLOCK, "what comes before the image"
    assert await cached(2) == whole
    assert await cached(1) == whole
    plain = before + (IMAGE_TOKEN,) * ROWS + after
    report = (await generate(engine, request_for(plain)))[0].prompt
    assert report is not None and report.cached_tokens == BLOCK, "image tokens without an image are text"


async def test_events_name_the_images_in_each_block(subject: Subject) -> None:
    """Blocks with parts of two images, given BLOCK = ROWS = 16.

    Four tokens come first, then two images one behind the other, so the second block has a part of both.
    """
    request = showing(prompt_of(4), 11, 12, prompt_of(30), max_tokens=1)
    first, second = (image.key for image in request.spans)
    await generate(subject.engine, request)
    expected = [[(first, 0)], [(first, 12), (second, 0)], [(second, 12)]]
    found: list[list[tuple[int | str, int | str]]] = []
    for _ in range(100):
        blocks = [block for event in subject.events if isinstance(event.data, Stored) for block in event.data.blocks]
        found = [
            [(key["hash"], key["start_offset"]) for key in block.mm_keys]
            for block in blocks
            if {key["hash"] for key in block.mm_keys} & {first, second}
        ]
        if len(found) == 3:
            break
        await asyncio.sleep(0.05)
    assert found == expected
    assert all(key["type"] == "mm_key" for block in blocks for key in block.mm_keys)
    assert all(not block.mm_keys for block in blocks if IMAGE_TOKEN not in {token.token_id for token in block.tokens})


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": -1},
        {"start": 21},
        {"length": 0},
        {"rows": 0},
        {"rows": ROWS + 1},
        {"data": b""},
        {"key": "short"},
        {"dtype": "int8"},
    ],
)
async def test_an_impossible_image_is_refused(engine: Engine, wrong: dict[str, object]) -> None:
    request = showing(prompt_of(10), 1, prompt_of(10))
    with pytest.raises(InvalidRequest) as caught:
        await generate(engine, replace(request, media=MediaSpans((replace(request.spans[0], **wrong),))))
    assert caught.value.param == "prompt"


async def test_images_that_overlap_are_refused(engine: Engine) -> None:
    request = showing(prompt_of(2), 1, 2)
    for images in (request.spans[::-1], (request.spans[0], replace(request.spans[1], start=17))):
        with pytest.raises(InvalidRequest):
            await generate(engine, replace(request, media=MediaSpans(tuple(images))))


@pytest.mark.parametrize(
    "media", [MediaFiles("", (MediaInput(b""),)), Encoding(version=1, backend="trtllm", prompt="", state=b"")]
)
async def test_images_that_are_not_encoded_as_its_own_are_refused(engine: Engine, media: PromptMedia) -> None:
    with pytest.raises(InvalidRequest):
        await generate(engine, replace(request_for(prompt_of(5)), media=media))


@pytest.mark.parametrize("parts", [(1,), (1, 2), ((5, 6, 7), 1, tuple(range(40, 80)), 2)])
async def test_decode_needs_no_embeddings(engine: Engine, parts: tuple[int | tuple[int, ...], ...]) -> None:
    request = showing(*parts, prompt_of(3), max_tokens=20, logprobs=0)
    whole = await generate(engine, request)
    handed, stream = await prefill(engine, request)
    rest = await generate(engine, replace(request, handoff=handed, media=without_data(request.spans)))
    await stream.aclose()
    assert tokens_of([handed.first, *rest]) == tokens_of(whole) and rest[-1].finish_reason == "length"
    await idle(engine)


async def test_lost_blocks_are_computed_again_with_embeddings_and_not_without(engine: Engine) -> None:
    request = showing(prompt_of(BLOCK), 3, prompt_of(5), max_tokens=20)
    handed, stream = await prefill(engine, request)
    await stream.aclose()
    lost = replace(request, handoff=replace(handed, state=b""), cache_salt="elsewhere")
    rest = await generate(engine, lost)
    assert tokens_of([handed.first, *rest]) == tokens_of(await generate(engine, request))
    with pytest.raises(EngineUnavailable):
        await generate(
            engine, replace(lost, media=without_data(request.spans), cache_salt="another", request_id="lost")
        )
    await idle(engine)


async def test_a_handoff_of_other_images_is_refused_or_of_no_use(engine: Engine) -> None:
    if engine.info.backend != "fake":
        pytest.skip("the embedded engine trusts that replicas agree on what they compute")
    text = prompt_of(9)
    handed, stream = await prefill(engine, showing(text, 1))
    with pytest.raises(InvalidRequest, match="another prompt"):
        await generate(engine, replace(showing(text, 2), handoff=handed))
    await stream.aclose()
