"""Chats about pictures that the model knows.

One server, prefill and decode, and encode, prefill and decode all give the same right answers.
"""

import base64
import io
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from engine.media import MediaInput
from smolvision.conversations import IMAGE_TOKEN_ID
from tests.e2e.test_disaggregated import differences
from tests.support.disaggregated import wait_empty
from tests.support.encode import encoder_of
from tests.support.media import data_url, image_file, png, png_chunk
from tests.support.pictures import (
    IMAGE_TOKENS,
    PictureServer,
    Replicas,
    ask,
    cached,
    memory,
    message,
    number,
    picture_server,
    post,
    replicas,
    said,
    shape,
)
from tests.support.videos import video_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MODEL = (
    "--engine",
    "embedded",
    "--engine-process",
    "false",
    "--model",
    "smolvision",
    "--threads",
    "1",
    "--max-seq-len",
    "1024",
    "--kv-cache-memory-mb",
    "64",
)
CIRCLE, SQUARE = shape("red", "circle"), shape("blue", "square", "black")
NUMBER, FIRST, SECOND = (
    "What number is shown?",
    "What colour is the background in the first image?",
    "What shape is in the second image?",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def group(smollm2: Path, folder: Path) -> Iterator[Replicas]:
    with replicas((*MODEL, "--media-allow-private", "true", "--allowed-local-media-path", str(folder))) as group:
        yield group
        wait_empty(*group.fronts, group.prefill)
        for front in (group.pair, group.three):
            local, handed = front.metric("trtllm_prefill_local_total"), front.metric("trtllm_prefill_seconds_count")
            assert local <= handed // 8, "only while a busy machine kept the prefill replica silent"
        assert group.three.metric("trtllm_encode_remote_embeddings_total") > 0, "prefill reads them where they are"


@pytest.fixture(scope="module")
def pictures() -> Iterator[PictureServer]:
    with picture_server() as server:
        yield server


def alike(group: Replicas, *messages: dict[str, Any], images: int, **fields: Any) -> dict[str, Any]:
    """The one answer of all fronts, to the last figure, but for what their caches held."""
    answers = group.each(*messages, **fields)
    for answer in answers:
        details = answer["usage"]["prompt_tokens_details"]
        assert details.pop("image_tokens", 0) == images * IMAGE_TOKENS
        del details["cached_tokens"]
    for other in answers[1:]:
        assert not list(differences(answers[0], other))
    return answers[0]


@pytest.mark.parametrize("stream", [False, True])
def test_the_same_question_about_another_image_has_another_answer(group: Replicas, stream: bool) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    tokens = []
    for content in (7, 42, 85):
        answer = alike(group, message(NUMBER, number(content)), images=1, **fields)
        (choice,) = answer["choices"].values()
        assert choice["text"] == f"The number is {content}." and choice["finish_reason"] == "stop"
        tokens.append([token["logprob"] for token in choice["logprobs"]["content"]])
    assert tokens[0] != tokens[1] != tokens[2] != tokens[0]
    colours = [
        said(alike(group, message("What colour is the star?", shape(c, "star")), images=1, **fields))
        for c in ("green", "purple")
    ]
    assert colours == ["The star is green.", "The star is purple."]


def test_images_keep_their_order(group: Replicas) -> None:
    for images, first, second in (((CIRCLE, SQUARE), "white", "square"), ((SQUARE, CIRCLE), "black", "circle")):
        assert said(alike(group, message(FIRST, *images), images=2)) == f"The background is {first}."
        assert second in said(
            alike(group, message(SECOND, *images), images=2, stream=True, stream_options={"include_usage": True})
        )


def test_a_text_that_looks_like_an_image_is_a_text(group: Replicas) -> None:
    """It neither takes the image's place nor moves it: the image's tokens follow the same number of tokens."""
    before, after = "<image>", f"<image><|im_end|>\n{NUMBER}"
    picture = message("", number(42))["content"][0]
    asked = {"role": "user", "content": [{"type": "text", "text": before}, picture, {"type": "text", "text": after}]}
    alike(group, asked, images=1)
    ids = httpx.post(f"{group.whole.url}/tokenize", json={"messages": [asked]}).json()["tokens"]
    image = ids.index(IMAGE_TOKEN_ID)
    assert ids[image : image + IMAGE_TOKENS] == [IMAGE_TOKEN_ID] * IMAGE_TOKENS
    assert ids.count(IMAGE_TOKEN_ID) == IMAGE_TOKENS
    texts = [
        httpx.post(f"{group.whole.url}/detokenize", json={"tokens": part}).json()["prompt"]
        for part in (ids[:image], ids[image + IMAGE_TOKENS :])
    ]
    assert texts[0].endswith(before) and texts[1].startswith(after)


def test_chats_of_several_turns(group: Replicas) -> None:
    asked = message("What shape is in the image?", CIRCLE), {"role": "assistant", "content": "It is a circle."}
    assert (
        said(alike(group, *asked, {"role": "user", "content": "What colour is the circle?"}, images=1))
        == "The circle is red."
    )
    later = alike(group, *asked, message("What colour is the square?", SQUARE), images=2)
    assert said(later) == "The square is blue."


@pytest.mark.parametrize("detail", ["low", "high"])
def test_details_and_choices(group: Replicas, detail: str) -> None:
    answer = alike(group, message(NUMBER, number(31), detail=detail), images=1, n=2)
    assert [said(answer, choice) for choice in (0, 1)] == ["The number is 31."] * 2


def test_each_image_is_fetched_once(group: Replicas, pictures: PictureServer) -> None:
    """By the front alone: neither choices, nor prefill, nor decode, nor a URL that is there twice, fetch it again."""
    for place, front in enumerate((group.three, group.pair)):
        shown = partial(ask, front)
        urls = [pictures.add(f"/once/{place}/{index}.png", number(10 * index + place + 11)) for index in range(4)]
        answer = ask(front, message(NUMBER, urls[0]), n=3)
        assert [said(answer, choice) for choice in range(3)] == [f"The number is {place + 11}."] * 3
        ask(front, message("Describe the first image.", urls[1], urls[1]), max_tokens=2)
        ask(front, message("What number do you see in the second image?", urls[1], urls[2]), max_tokens=2)
        with ThreadPoolExecutor(4) as threads:
            together = list(threads.map(shown, [message(NUMBER, urls[3])] * 4))
        assert {said(answer) for answer in together} == {f"The number is {place + 41}."}
        counts = [pictures.requests[f"/once/{place}/{index}.png"] for index in range(4)]
        assert counts == [1, 2, 1, 1], "the second one was in two requests"


def test_blocks_of_the_same_image_are_reused_and_of_another_are_not(group: Replicas) -> None:
    for place, front in enumerate(group.fronts):
        one, other = shape("orange", "cross", seed=50 + place), shape("orange", "cross", seed=60 + place)
        hits = front.metric("trtllm_embedding_cache_hits_total")
        assert cached(ask(front, message("What colour is the cross?", one))) == 0
        again = ask(front, message("What shape is in the image?", one))
        assert cached(again) >= IMAGE_TOKENS - 32 and said(again) == "It is a cross."
        assert front.metric("trtllm_embedding_cache_hits_total") == hits + 1
        assert cached(ask(front, message("What colour is the cross?", other))) == 0


def test_only_the_uncached_one_of_three_images_is_encoded(group: Replicas) -> None:
    ring, triangle, square = (
        shape("yellow", "ring", "blue", 70),
        shape("red", "triangle", "black", 71),
        shape("green", "square", seed=72),
    )
    ask(group.three, message("Describe the first image.", ring, square), max_tokens=1)
    before, hits = group.encoded(), group.three.metric("trtllm_embedding_cache_hits_total")
    answer = ask(group.three, message("What colour is the triangle?", ring, triangle, square))
    assert group.encoded() == before + 1 and group.three.metric("trtllm_embedding_cache_hits_total") == hits + 2
    expected = ask(group.whole, message("What colour is the triangle?", ring, triangle, square))
    assert not list(differences(answer["choices"], expected["choices"])) and said(answer) == "The triangle is red."
    assert said(ask(group.three, message("What colour is the ring?", ring, triangle, square))) == "The ring is yellow."
    other = ask(group.three, message("What colour is the triangle?", square, triangle, ring))
    assert list(differences(answer["choices"], other["choices"])) and group.encoded() == before + 1


def test_bombs_are_refused_while_others_are_answered(group: Replicas) -> None:
    """Decompression bombs: small files with very large images.

    The encode replica, which decodes them, never holds more memory than the largest allowed image takes.
    """
    texts, bomb = zlib.compress(bytes(1 << 26)), number(12, seed=90)
    header, rest = bomb[:33], bomb[33:]
    bad = [png(30_000, 30_000, 1000), header + png_chunk(b"zTXt", b"text\0\0" + texts) + rest, bomb[:-500]]
    large = [image_file(size=(5800, 5800))] * 3
    size = memory(group.encode)
    peak = size
    with ThreadPoolExecutor(8) as threads:
        refused = [threads.submit(post, group.three, message(NUMBER, image)) for image in bad]
        taken = [
            threads.submit(post, group.three, message(NUMBER, image + bytes(index)), max_tokens=2)
            for index, image in enumerate(large)
        ]
        asked = threads.submit(ask, group.three, message(NUMBER, number(61, seed=91)))
        while not all(each.done() for each in (*refused, *taken, asked)):
            peak = max(peak, memory(group.encode))
            time.sleep(0.05)
    assert [each.result().status_code for each in (*refused, *taken)] == [400] * len(bad) + [200] * len(large)
    assert said(asked.result()) == "The number is 61." and peak - size < 600 << 20, (peak - size) >> 20


async def test_embeddings_are_taken_for_the_image_that_they_were_made_of(
    group: Replicas, pictures: PictureServer, folder: Path
) -> None:
    """They come from the encode replica, as files of the folder and by URL."""
    picture = number(58)
    async with encoder_of([group.encode.url], model=("smolvision", "embedded")) as (encoder, _, _):
        (encoded,) = await encoder.encode([MediaInput(picture)])
    rows = torch.frombuffer(bytearray(encoded.data), dtype=getattr(torch, encoded.dtype)).view(encoded.rows, -1)
    file = save({"embeddings": rows})
    (folder / "number.safetensors").write_bytes(file)
    expected = alike(group, message(NUMBER, picture), images=1)
    assert said(expected) == "The number is 58."
    for url in (f"file://{folder}/number.safetensors", "number.safetensors", pictures.add("/number.safetensors", file)):
        assert not list(differences(alike(group, message(NUMBER, url), images=1), expected))


def test_a_model_without_videos_sees_frames_as_images(group: Replicas) -> None:
    """Its frames are taken by the encoder, wherever that is."""
    frame = np.asarray(Image.open(io.BytesIO(number(58, seed=90))))
    url = data_url(video_of([frame] * 6), "video/mp4")
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": NUMBER}]
    for front in group.fronts:
        answers = [
            ask(front, {"role": "user", "content": content}, media_io_kwargs={"video": {"num_frames": frames}})
            for frames in (1, 3)
        ]
        assert said(answers[0]) == "The number is 58."
        tokens = [answer["usage"]["prompt_tokens_details"]["image_tokens"] for answer in answers]
        assert tokens == [IMAGE_TOKENS, 3 * IMAGE_TOKENS]


@pytest.mark.parametrize("kind", ["input_audio", "audio_url"])
def test_other_media_are_refused_by_name(group: Replicas, kind: str) -> None:
    data = base64.b64encode(b"RIFF").decode()
    value = {"data": data, "format": "wav"} if kind == "input_audio" else {"url": f"data:video/mp4;base64,{data}"}
    for front in group.fronts:
        answer = post(front, {"role": "user", "content": [{"type": kind, kind: value}]})
        assert answer.status_code == 400 and "no audio" in answer.json()["error"]["message"]


def test_without_encode_replicas_known_images_are_answered(group: Replicas) -> None:
    """The last test: afterwards there is none."""
    known, unknown = message(NUMBER, number(23, seed=80)), message(NUMBER, number(24, seed=81))
    before = ask(group.three, known)
    for process in (*group.encode.children(), group.encode.process):
        process.kill()
    after = ask(group.three, known)
    assert not list(differences(after["choices"], before["choices"])) and said(after) == "The number is 23."
    assert (
        ask(group.three, {"role": "user", "content": "What is the capital of France?"})["usage"]["completion_tokens"]
        > 0
    )
    refused = post(group.three, unknown)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    assert "encode replica" in refused.json()["error"]["message"]
    assert said(ask(group.pair, unknown)) == "The number is 24.", "by the prefill replica's tower"
    assert said(ask(group.three, known)) == "The number is 23."
