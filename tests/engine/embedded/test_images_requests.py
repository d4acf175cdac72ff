"""Prompts with images in the embedded engine: handoffs, losses, refusals, and the keys of their blocks."""

import struct
from collections.abc import AsyncIterator
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.config import EmbeddedConfig
from engine.embedded.engine import EmbeddedEngine
from engine.embedded.kv.blocks import block_key, root_key
from engine.embedded.models.embeddings import NO_IMAGES
from engine.embedded.vision.kept import KeptRows, RowsReader
from engine.errors import EmbeddingsLost, EngineFailure, EngineUnavailable, InvalidRequest
from engine.kit.checks import ImageTokens, check_embeddings, check_prompt
from engine.media import MediaSpan, MediaSpans, overlaps_of
from engine.transfer.base import LeaseWord
from engine.types import Delta, GenerateRequest
from tests.support.handoff import Pair, pair_of, sequence_of, step, tokens
from tests.support.vision_models import BUILDERS
from tests.support.vision_prompts import Family, Prompt, request_for, text, without_data

SMALL: dict[str, Any] = {"attention": "sdpa", "kv_block_size": 8, "num_blocks": 100}


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(BUILDERS[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def prompts(family: Family) -> list[Prompt]:
    return [
        family.prompt(text(13, 0), 0, text(4, 1)),
        family.prompt(text(13, 0), 1, text(4, 1)),
        family.prompt(2, [70], 3),
    ]


@pytest.fixture(scope="module")
def expected(family: Family, prompts: list[Prompt]) -> list[list[int]]:
    return [family.generate(prompt) for prompt in prompts]


def hand_over(pair: Pair, requests: list[GenerateRequest], **changes: Any) -> list[list[int]]:
    """Have the decode core take what the other has computed, without the images' embeddings; the first tokens."""
    first = []
    for request in requests:
        handed = replace(pair.hand_over(request), **changes)
        pair.decode.add(sequence_of(pair.decode, replace(without_data(request), handoff=handed)))
        first.append(list(handed.first.token_ids))
    return first


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_decode_needs_no_embeddings(
    family: Family, prompts: list[Prompt], expected: list[list[int]], overlap: str
) -> None:
    with pair_of(family.folder, {**SMALL, "max_num_tokens": 20}, {**SMALL, "overlap_scheduler": overlap}) as pair:
        first = hand_over(pair, [request_for(str(index), prompt) for index, prompt in enumerate(prompts)])
        deltas = pair.finish()
        assert [first[index] + tokens(deltas[str(index)]) for index in range(len(prompts))] == expected
        assert pair.decode.stats().kv_transfer_failure_total == 0
        pair.check_clean()


def test_lost_blocks_are_computed_again_where_the_embeddings_are(
    family: Family, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    request = request_for("a", prompts[2])
    with pair_of(family.folder, SMALL, SMALL) as pair:
        handed = replace(pair.hand_over(request), state=b"")
        pair.decode.add(sequence_of(pair.decode, replace(request, handoff=handed)))
        assert list(handed.first.token_ids) + tokens(pair.finish()["a"]) == expected[2]


def test_without_them_the_request_ends_and_others_go_on(
    family: Family, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    with pair_of(family.folder, SMALL, SMALL) as pair:
        [first] = hand_over(pair, [request_for("whole", prompts[0])])
        while not (known := step(pair.decode)):
            pass
        hand_over(pair, [request_for("lost", prompts[2])], state=b"")
        outputs = dict(pair.decode.step())
        error = outputs.pop("lost")
        assert type(error) is EngineUnavailable and str(error) == NO_IMAGES
        pair.decode.scheduler.audit()
        assert first + tokens([*dict(known).values(), *outputs.values(), *pair.finish()["whole"]]) == expected[0]  # type: ignore[list-item]
        pair.check_clean()


def test_blocks_computed_by_another_request_are_reused(
    family: Family, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    """The blocks of the image are here; only text is computed."""
    prompt = replace_fields(prompts[0], tokens=(*prompts[0].tokens, *text(9, 3)))
    with pair_of(family.folder, SMALL, SMALL) as pair:
        pair.decode.add(sequence_of(pair.decode, request_for("before", prompt)))
        pair.finish()
        [first] = hand_over(pair, [request_for("a", prompt)], state=b"")
        assert first + tokens(pair.finish()["a"]) == family.generate(prompt)


def test_a_preempted_decode_ends(family: Family, prompts: list[Prompt]) -> None:
    """Its blocks are gone, and nobody can compute them again here; the other, whichever that is, goes on."""
    small = {**SMALL, "kv_block_size": 2}
    pressed = {
        **small,
        "enable_block_reuse": False,
        "num_blocks": sum(-(-len(prompt.tokens) // 2) for prompt in prompts[:2]) + 4,
    }
    last: dict[str, Any] = {}
    with pair_of(family.folder, small, pressed) as pair:
        hand_over(pair, [request_for(str(index), prompts[index], max_tokens=36) for index in range(2)])
        while pair.decode.busy:
            last |= dict(pair.decode.step())
            pair.decode.scheduler.audit()
        assert pair.decode.stats().num_preemptions == 1
        ended, whole = sorted(last.values(), key=lambda output: isinstance(output, Delta))
        assert isinstance(whole, Delta) and whole.finish_reason == "length"
        assert type(ended) is EngineUnavailable and str(ended) == NO_IMAGES
        pair.finish()


@pytest.fixture
async def engine(family: Family) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(
        EmbeddedConfig(model=str(family.folder), dtype="float32", threads=1, kv_cache_memory_mb=16, **SMALL)
    )
    await engine.start()
    yield engine
    await engine.close()


async def test_the_engine_takes_and_refuses_images(
    engine: EmbeddedEngine,
    family: Family,
    prompts: list[Prompt],
    expected: list[list[int]],
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = request_for("a", prompts[2])
    assert tokens([delta async for delta in engine.generate(request)]) == expected[2]
    kept = KeptRows(1 << 20, torch.device("cpu"), 60.0)
    stay = [kept.put(torch.frombuffer(bytearray(span.data), dtype=torch.uint8)) for span in request.spans]  # type: ignore[arg-type]
    spans = [replace(span, data=b"", remote=rows) for span, rows in zip(request.spans, stay, strict=True)]
    elsewhere = replace(request, request_id="b", media=MediaSpans(tuple(spans)))
    assert tokens([delta async for delta in engine.generate(elsewhere)]) == expected[2]
    lost = replace(spans[0].remote, lease=LeaseWord(0, 1))  # type: ignore[type-var]
    with pytest.raises(EmbeddingsLost):
        await anext(engine.generate(replace(request, media=MediaSpans((replace(spans[0], remote=lost), *spans[1:])))))
    short = replace(spans[0].remote, size=16)  # type: ignore[type-var]
    with pytest.raises(InvalidRequest, match="image 0 has 16 bytes"):
        await anext(engine.generate(replace(request, media=MediaSpans((replace(spans[0], remote=short), *spans[1:])))))
    monkeypatch.setattr(RowsReader, "fetched", _broken)
    with pytest.raises(EngineFailure, match="MemoryError"):
        await anext(engine.generate(elsewhere))
    wrong = replace(request, media=MediaSpans((replace(request.spans[0], data=b"0" * 16), request.spans[1])))
    with pytest.raises(InvalidRequest, match="image 0 has 16 bytes"):
        await anext(engine.generate(wrong))
    blind = EmbeddedEngine(
        EmbeddedConfig(model=str(tiny_model), dtype="float32", threads=1, kv_cache_memory_mb=16, **SMALL)
    )
    await blind.start()
    try:
        with pytest.raises(InvalidRequest, match="takes no images"):
            await anext(blind.generate(request))
    finally:
        await blind.close()


async def _broken(self: RowsReader, request: GenerateRequest, device: str) -> GenerateRequest:
    raise MemoryError


# ---- What is asked of spans, rows, bytes and grids.

IMAGE_TOKEN = 9
TAKES = ImageTokens(IMAGE_TOKEN, 4)
PROMPT = (1, *[IMAGE_TOKEN] * 4, 2, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN, 3)


def picture(start: int, length: int = 4, **changes: Any) -> MediaSpan:
    rows = changes.pop("rows", length)
    fields = {"key": "ab" * 32, "dtype": "bfloat16", "data": bytes(rows * 8), "grid": (1, 4, 4), **changes}
    return MediaSpan(start=start, length=length, rows=rows, **fields)


def check(*images: MediaSpan, takes: ImageTokens | None = TAKES) -> None:
    request = GenerateRequest(
        request_id="a",
        prompt_token_ids=PROMPT,
        sampling=request_for("a", Prompt((1,), (), ())).sampling,
        media=MediaSpans(images),
    )
    check_prompt(request, 10, 100)
    check_embeddings(request, takes)


def test_good_images_pass() -> None:
    check()
    check(takes=None)
    check(picture(1), picture(6))
    check(picture(0, 6, rows=4), picture(6))
    check(picture(1, dtype="float32", data=bytes(64)))
    check(picture(1), picture(6), takes=TAKES._replace(merge=2))


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ([picture(6), picture(1)], "image 1 must lie within the prompt and behind"),
        ([picture(1), picture(4)], "image 1 must lie within the prompt and behind"),
        ([picture(-1)], "image 0 must lie within"),
        ([picture(1, 0)], "image 0 must lie within"),
        ([picture(8, 4)], "image 0 must lie within"),
        ([picture(1, rows=0)], "must have a row at least"),
        ([picture(1, rows=5)], "no more than its span"),
        ([picture(1, key="ab")], "64 hex digits"),
        ([picture(1, key="AB" * 32)], "64 hex digits"),
        ([picture(1, dtype="int8")], "one of float32, bfloat16, float16"),
        ([picture(1, data=b"")], "image 0 has no embeddings"),
        ([picture(1, 5, rows=5)], "image 0 has 5 rows for 4 image tokens"),
        ([picture(1, rows=3)], "image 0 has 3 rows for 4 image tokens"),
        ([picture(1, data=bytes(33))], "image 0 has 33 bytes of embeddings; its rows have 32"),
    ],
)
def test_bad_images_are_refused(images: list[MediaSpan], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as raised:
        check(*images)
    assert raised.value.param == "prompt"


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ([picture(1, grid=(0, 0, 0))], "does not make 4 rows"),
        ([picture(1, grid=(1, 4, 8))], "does not make 4 rows"),
        ([picture(1, grid=(1, 1, 16))], "does not make 4 rows"),
        ([picture(1, 6, rows=5, grid=(1, 2, 10))], "tokens of image 0 must be together"),
        (
            [picture(1, 2, grid=(1, 2, 4)), picture(3, 2, grid=(1, 2, 4))],
            "tokens of image 1 must be together, and apart",
        ),
    ],
)
def test_grids_must_fit_where_positions_depend_on_them(images: list[MediaSpan], reason: str) -> None:
    check(*images)
    with pytest.raises(InvalidRequest, match=reason):
        check(*images, takes=TAKES._replace(merge=2))


def test_a_model_without_eyes_refuses() -> None:
    with pytest.raises(InvalidRequest, match="takes no images"):
        check(picture(1), takes=None)


# ---- Keys of blocks.


def test_keys_of_text_are_as_they_were() -> None:
    parent = root_key("salt")
    assert block_key(parent, [1, 2, 3]) == blake3(parent + struct.pack("<3i", 1, 2, 3)).digest()
    assert overlaps_of([picture(8)], 0, 8) == () == overlaps_of([picture(4)], 8, 8)


LAYOUTS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 20), st.sampled_from(["aa", "bb"])), max_size=4)


@given(LAYOUTS, LAYOUTS)
def test_blocks_share_a_key_only_if_all_images_before_their_end_are_the_same(
    one: list[tuple[int, int, str]], other: list[tuple[int, int, str]]
) -> None:
    """All tokens are alike; an image's key decides how long its span is."""
    many: list[list[MediaSpan]] = []
    for layout in (one, other):
        images, end = [], 0
        for gap, length, key in layout:
            images.append(picture(end + gap, length, key=key * 31 + f"{length:02x}"))
            end += gap + length
        many.append(images)
    parents = [root_key("")] * 2
    for start in range(0, 112, 8):
        parents = [
            block_key(parent, [9] * 8, overlaps_of(images, start, 8))
            for parent, images in zip(parents, many, strict=True)
        ]
        seen = [[(image.start, image.key) for image in images if image.start < start + 8] for images in many]
        assert (parents[0] == parents[1]) == (seen[0] == seen[1])
