"""Embeddings that processes of this host share.

They are found where a reference says, live as long as somebody has them, and have the right values.
"""

import asyncio
import errno
import gc
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import cast
from unittest.mock import AsyncMock, Mock

import msgspec
import psutil
import pytest
import pytest_asyncio
import torch
from blake3 import blake3
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForImageTextToText

from engine.config import EmbeddedConfig, EncoderConfig
from engine.embedded.vision.encoder import EmbeddedEncoder
from engine.embedded.vision.process import EncoderProcess
from engine.errors import EngineFailure, EngineUnavailable, InvalidRequest
from engine.media import EncodedMedia, MediaInput, MediaSpan, MediaSpans
from engine.process import wire
from engine.process.child import EngineProcess
from engine.process.client import EngineClient
from engine.replicas.encode_answers import EmbeddingStore, decode_answer, fetch
from engine.transfer import shared_bytes
from engine.transfer.base import NotFromHere
from engine.transfer.shared_bytes import (
    SHARED_FROM,
    Data,
    Reference,
    SharedBytes,
    crowded,
    opened,
    readable,
    shared_or_copied,
)
from engine.types import GenerateRequest, SamplingParams, TokenLogprobs
from tests.support.encode import arena
from tests.support.engine_cases import rounded
from tests.support.vision_models import TOKENS, build_llava, image_bytes
from tests.support.vision_prompts import text

in_one_loop = pytest.mark.asyncio(loop_scope="module")
HIDDEN, SIDE = 2048, 84
ROWS = (SIDE // 7) ** 2
CONTENT = os.urandom(SHARED_FROM)


def in_another_process(reference: Reference) -> "subprocess.Popen[str]":
    """One that opens what is referred to, says so, and, once it is asked to, prints its digest."""
    code = f"""
import sys, blake3, msgspec
from engine.transfer.shared_bytes import Reference, opened
memory = opened(msgspec.json.decode({msgspec.json.encode(reference)!r}, type=Reference))
print(len(memory), flush=True)
sys.stdin.readline()
print(blake3.blake3(memory).hexdigest())
"""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_another_process_reads_them_when_their_owner_has_let_go() -> None:
    memory = SharedBytes.of(CONTENT)
    with in_another_process(memory.reference) as process:
        assert process.stdout is not None and int(process.stdout.readline()) == len(CONTENT)
        del memory
        out, err = process.communicate("\n")
    assert out.strip() == blake3(CONTENT).hexdigest(), err


def test_other_files_are_not_taken_for_shared_bytes(tmp_path: Path) -> None:
    memory, other = SharedBytes.of(CONTENT), (tmp_path / "file").open("w+b")
    reference, before = memory.reference, descriptors()
    wrong = [
        replace(reference, inode=reference.inode + 1),
        replace(reference, size=reference.size - 1),
        replace(reference, fd=other.fileno(), inode=os.fstat(other.fileno()).st_ino),
        replace(reference, process=replace(reference.process, boot="another")),
    ]
    for each in wrong:
        with pytest.raises(NotFromHere):
            opened(each)
        assert not wire.can_open(each)
    assert wire.can_open(reference) and descriptors() == before
    del memory
    assert not wire.can_open(reference)
    other.close()


def test_a_readers_writes_are_private_and_its_mapping_outlives_the_owner() -> None:
    memory, before = SharedBytes.of(CONTENT), mappings()
    one, other = opened(memory.reference), memory.read()
    one[:4] = b"1234"
    assert mappings() == before + 2
    assert bytes(other) == memory.copy() == CONTENT
    del memory
    assert bytes(one) == b"1234" + CONTENT[4:] and bytes(other) == CONTENT
    tail = one[-4:]
    del one, other
    assert bytes(tail) == CONTENT[-4:] and mappings() == before + 1
    del tail
    assert mappings() == before


def mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:trellis")


def descriptors() -> int:
    gc.collect()
    return sum("memfd:trellis" in os.readlink(f"/proc/self/fd/{fd}") for fd in shared_bytes.open_descriptors)


def test_descriptors_go_with_them_and_are_never_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    memories = [SharedBytes.of(b"some") for _ in range(20)]
    views = [memory.read() for memory in memories]
    assert descriptors() == before + 20 and not crowded()
    memories.append(cast(SharedBytes, shared_or_copied(CONTENT)))
    assert type(memories[-1]) is SharedBytes and shared_or_copied(b"few") == b"few"
    with monkeypatch.context() as patch:
        patch.setattr(shared_bytes.resource, "getrlimit", lambda _: (40, 40))
        assert crowded() and shared_or_copied(CONTENT) == CONTENT
    with monkeypatch.context() as patch:
        patch.setattr(shared_bytes, "make_memory", Mock(side_effect=OSError(errno.EMFILE, "")))
        assert shared_or_copied(CONTENT) == CONTENT
    with monkeypatch.context() as patch:
        patch.setattr(shared_bytes, "MemfdMapping", Mock(side_effect=OSError(errno.ENOMEM, "")))
        assert readable(memories[0]) == b"some"
    memories.clear()
    assert descriptors() == before and bytes(views[0]) == b"some"


def request_of(*images: Data, **fields: object) -> GenerateRequest:
    """A prompt that shows them, whatever the model makes of its text."""
    prompt: list[int] = []
    shown = []
    for index, data in enumerate(images):
        prompt += text(3, index)
        shown.append(
            MediaSpan(key=f"{index:064}", start=len(prompt), length=ROWS, rows=ROWS, dtype="float32", data=data)
        )
        prompt += [TOKENS["<image>"]] * ROWS
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
    return GenerateRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=(*prompt, *text(3, 9)),
        sampling=params,
        media=MediaSpans(tuple(shown)),
    )


def test_messages_have_references_only_where_the_reader_can_open_them() -> None:
    request = request_of(b"few", SharedBytes.of(CONTENT), b"more", SharedBytes.of(CONTENT[::-1]))
    bare, parts = request.detach()
    for shares, count in ((True, 2), (False, 4)):
        command, frames = wire.call(1, "generate", wire.encode(bare), parts, shares)
        assert len(frames) == count
        images = bare.attach(wire.parts_of(command, [bytes(frame) for frame in frames])).spans
        assert [bytes(readable(image.data)) for image in images] == [b"few", CONTENT, b"more", CONTENT[::-1]]
        assert (wire.largest(command, frames) > 2 * SHARED_FROM) == (not shares)


@pytest.mark.parametrize("inline", [False, True])
async def test_from_one_replica_to_another(inline: bool) -> None:
    async with arena() as there, arena() as here:
        store = EmbeddingStore(there, 0, Mock())
        images = [
            EncodedMedia(text="x", rows=1, data=data, dtype="float32")
            for data in (SharedBytes.of(CONTENT), b"few", SharedBytes.of(CONTENT[::-1]))
        ]
        answer, place = await store.put(images, inline)
        assert (place is None) == inline
        found = await fetch(decode_answer(answer), here, 5)
        assert [bytes(readable(image.data)) for image in found] == [CONTENT, b"few", CONTENT[::-1]]
        assert isinstance(found[0].data, SharedBytes) != inline, (
            "read from one arena to another, they can be shared again"
        )
        if place is not None:
            store.free(place)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA with so many rows of such a size that they are shared, and little else."""
    folder = build_llava(tmp_path_factory.mktemp("llava"))
    config = AutoConfig.from_pretrained(folder)
    config.text_config.hidden_size, config.text_config.head_dim = HIDDEN, 32
    config.vision_config.image_size, config.image_seq_length = SIDE, ROWS
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    pixels = json.loads((folder / "preprocessor_config.json").read_text())
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels | sizes))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def encoder(folder: Path) -> AsyncIterator[EmbeddedEncoder]:
    encoder = EmbeddedEncoder(EncoderConfig(model=str(folder), dtype="float32", threads=1))
    await encoder.start()
    yield encoder
    await encoder.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[EngineClient]:
    options = {"dtype": "float32", "num_blocks": 60, "max_seq_len": 512, "threads": 1, "enable_block_reuse": False}
    process = EngineProcess(EmbeddedConfig(model=str(rounded(folder)), device="cpu", **options))  # type: ignore[arg-type]
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    await client.start()
    assert client.shares_memory and process.pid is not None
    client.host = process.pid  # type: ignore[attr-defined]
    yield client
    await client.close()
    await process.close()


FILES = [MediaInput(image_bytes(90, 90, seed)) for seed in range(3)]


@in_one_loop
async def test_from_the_encoder_to_the_engine(encoder: EmbeddedEncoder, engine: EngineClient) -> None:
    """Through three processes, and the answers of embeddings that were copied."""
    encoded = await encoder.encode(FILES)
    assert all(isinstance(image.data, SharedBytes) and image.rows == ROWS for image in encoded)
    copied = [replace(image, data=bytes(readable(image.data))) for image in encoded]
    answers = [await said(engine, images) for images in (encoded, copied, encoded[::-1])]
    assert answers[0] == answers[1] != answers[2]
    engine.shares_memory = False  # a host elsewhere
    assert await said(engine, encoded) == answers[0]
    engine.shares_memory = True
    with pytest.raises(InvalidRequest, match="bytes of embeddings"):
        await said(engine, [replace(encoded[0], data=SharedBytes.of(CONTENT))])


@in_one_loop
async def test_a_call_whose_memory_cannot_be_opened_fails_alone(
    encoder: EmbeddedEncoder, engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = await encoder.encode(FILES)
    expected = await said(engine, encoded)
    with monkeypatch.context() as patch:
        patch.setattr(SharedBytes, "reference", replace(SharedBytes.of(b"1").reference, fd=999))
        with pytest.raises(EngineUnavailable, match="cannot be opened"):
            await said(engine, encoded)
    assert await said(engine, encoded) == expected


@in_one_loop
async def test_a_host_with_few_descriptors_takes_many_images(encoder: EmbeddedEncoder, engine: EngineClient) -> None:
    """It has none open for an image, however many requests wait."""
    encoded = await encoder.encode(FILES)
    host = psutil.Process(engine.host)  # type: ignore[attr-defined]
    host.rlimit(psutil.RLIMIT_NOFILE, (host.num_fds() + 8, host.rlimit(psutil.RLIMIT_NOFILE)[1]))
    answers = await asyncio.gather(*(said(engine, encoded) for _ in range(20)))
    likely = [[entry[0].logprob for entry in answer] for answer in answers]
    assert len(likely) == 20 and likely == [pytest.approx(likely[0], abs=1e-3)] * 20, (
        "alike, but for how they were batched"
    )


@in_one_loop
async def test_a_server_with_few_descriptors_goes_on(encoder: EmbeddedEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings are copied when descriptors run out.

    Those for which there is no descriptor at all fail alone, and the tower's process stays.
    """
    pid = encoder.pid
    expected = [bytes(readable(image.data)) for image in await encoder.encode(FILES)]
    with monkeypatch.context() as patch:
        patch.setattr(shared_bytes.resource, "getrlimit", lambda _: (0, 0))
        held = [SharedBytes.of(b"1")]
        assert [image.data for image in await encoder.encode(FILES)] == expected
        held.clear()
    receive = socket.recv_fds
    with monkeypatch.context() as patch:
        patch.setattr(socket, "recv_fds", lambda *args: (receive(*args)[0], [], 0, None))
        with pytest.raises(EngineFailure, match="too many files"):
            await encoder.encode(FILES[:1])
    assert [bytes(readable(image.data)) for image in await encoder.encode(FILES)] == expected and encoder.pid == pid


@in_one_loop
async def test_an_encoder_that_cannot_be_talked_to_is_restarted(
    encoder: EmbeddedEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = encoder.pid
    with monkeypatch.context() as patch:
        patch.setattr(EncoderProcess, "send", AsyncMock(side_effect=OSError(errno.ENOMEM, "")))
        task = asyncio.create_task(encoder.encode(FILES[:1]))
        async with asyncio.timeout(30):
            while encoder.healthy:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    (image,) = await task
    assert image.rows == ROWS and encoder.pid != pid


async def said(client: EngineClient, images: Sequence[EncodedMedia]) -> list[TokenLogprobs]:
    deltas = [delta async for delta in client.generate(request_of(*(image.data for image in images)))]
    return [token for delta in deltas for token in delta.logprobs]
