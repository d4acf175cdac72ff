"""Embeddings that processes of this host share: found where a reference says, alive as long as somebody has them, and right."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import msgspec
import psutil
import pytest
import torch
from blake3 import blake3
from encode_support import arena
from image_support import text
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForImageTextToText
from vision_models import TOKENS, build_llava, image_bytes

from engine import wire
from engine.client import EngineClient
from engine.config import EmbeddedConfig, EncoderConfig
from engine.embedded.vision.encoder import EmbeddedEncoder
from engine.embeddings import EmbeddingStore, decode_embeddings, fetch
from engine.encoder import EncodedImage, ImageInput
from engine.errors import InvalidRequest
from engine.process import EngineProcess
from engine.transfer import shared_bytes
from engine.transfer.base import NotFromHere
from engine.transfer.shared_bytes import SHARED_FROM, Data, Reference, SharedBytes, kept, readable
from engine.types import GenerateRequest, Image, SamplingParams, TokenLogprobs

HIDDEN, SIDE = 2048, 84
ROWS = (SIDE // 7) ** 2
CONTENT = os.urandom(SHARED_FROM)


def in_another_process(reference: Reference) -> "subprocess.Popen[str]":
    """One that opens what is referred to, says so, and, once it is asked to, prints its digest."""
    code = f"""
import sys, blake3, msgspec
from engine.transfer.shared_bytes import Reference, SharedBytes
memory = SharedBytes.open(msgspec.json.decode({msgspec.json.encode(reference)!r}, type=Reference))
print(len(memory), flush=True)
sys.stdin.readline()
print(blake3.blake3(memory.read()).hexdigest())
"""
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_another_process_reads_them_when_their_owner_has_let_go() -> None:
    memory = SharedBytes.of(CONTENT)
    with in_another_process(memory.reference) as process:
        assert process.stdout is not None and int(process.stdout.readline()) == len(CONTENT)
        del memory
        out, err = process.communicate("\n")
    assert out.strip() == blake3(CONTENT).hexdigest(), err


def test_nothing_else_is_taken_for_them(tmp_path: Path) -> None:
    memory, other = SharedBytes.of(CONTENT), (tmp_path / "file").open("w+b")
    reference = memory.reference
    with pytest.raises(NotFromHere):
        SharedBytes.open(replace(reference, inode=reference.inode + 1))
    with pytest.raises(NotFromHere):
        SharedBytes.open(replace(reference, fd=other.fileno(), inode=os.fstat(other.fileno()).st_ino))
    with pytest.raises(NotFromHere):
        SharedBytes.open(replace(reference, process=replace(reference.process, boot="another")))
    del memory
    with pytest.raises((NotFromHere, OSError)):
        SharedBytes.open(reference)
    assert wire.opened(reference) == b""
    other.close()


def test_what_a_reader_writes_is_its_own() -> None:
    memory = SharedBytes.of(CONTENT)
    SharedBytes.open(memory.reference).read()[:4] = b"1234"
    assert bytes(memory.read()) == CONTENT


def test_descriptors_go_with_them_and_are_never_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    here, before = psutil.Process(), psutil.Process().num_fds()
    memories = [SharedBytes.of(b"some") for _ in range(20)]
    assert here.num_fds() == before + 20 and kept(memories[0]) is memories[0]
    monkeypatch.setattr(shared_bytes.resource, "getrlimit", lambda _: (40, 40))
    assert kept(memories[0]) == b"some"
    memories.clear()
    assert here.num_fds() == before


def request_of(*images: Data, **fields: object) -> GenerateRequest:
    """A prompt that shows them, whatever the model makes of its text."""
    prompt: list[int] = []
    shown = []
    for index, data in enumerate(images):
        prompt += text(3, index)
        shown.append(Image(key=f"{index:064}", start=len(prompt), length=ROWS, rows=ROWS, dtype="float32", data=data))
        prompt += [TOKENS["<image>"]] * ROWS
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
    return GenerateRequest(request_id="r", prompt_token_ids=(*prompt, *text(3, 9)), sampling=params, images=tuple(shown))


def test_on_the_wire_they_are_references_only_for_those_who_can_open_them() -> None:
    request = request_of(b"few", SharedBytes.of(CONTENT), b"more", SharedBytes.of(CONTENT[::-1]))
    for shares, frames in ((True, 3), (False, 5)):
        packed = wire.pack(3, [wire.Generate(1, request)], shares)
        assert len(packed) == frames
        (command,) = wire.unpack([bytes(frame) for frame in packed]).commands
        assert isinstance(command, wire.Generate)
        found = [bytes(readable(image.data)) for image in command.request.images]
        assert found == [b"few", CONTENT, b"more", CONTENT[::-1]]
        assert (wire.largest(request, shares) > 2 * SHARED_FROM) == (not shares)


@pytest.mark.parametrize("inline", [False, True])
async def test_from_one_replica_to_another(inline: bool) -> None:
    async with arena() as there, arena() as here:
        store = EmbeddingStore(there, 0, Mock())
        images = [
            EncodedImage(text="x", rows=1, data=data, dtype="float32")
            for data in (SharedBytes.of(CONTENT), b"few", SharedBytes.of(CONTENT[::-1]))
        ]
        answer, place = await store.put(images, inline)
        assert (place is None) == inline
        found = await fetch(decode_embeddings(answer), here, 5)
        assert [bytes(readable(image.data)) for image in found] == [CONTENT, b"few", CONTENT[::-1]]
        assert isinstance(found[0].data, SharedBytes) != inline, "read from one arena to another, they can be shared again"
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


async def said(client: EngineClient, images: Sequence[EncodedImage]) -> list[TokenLogprobs]:
    deltas = [delta async for delta in client.generate(request_of(*(image.data for image in images)))]
    return [token for delta in deltas for token in delta.logprobs]


async def test_from_the_encoder_to_the_engine(folder: Path) -> None:
    """Through three processes, and the answers of embeddings that were copied."""
    encoder = EmbeddedEncoder(EncoderConfig(model=str(folder), dtype="float32", threads=1))
    await encoder.start()
    try:
        files = [ImageInput(image_bytes(90, 90, seed)) for seed in range(2)]
        encoded = await encoder.encode([*files, ImageInput(image_bytes(20, 20, 3))])
        before = psutil.Process().num_fds()
        again = await encoder.encode(files)
    finally:
        await encoder.close()
    assert all(isinstance(image.data, SharedBytes) and image.rows == ROWS for image in encoded)
    assert psutil.Process().num_fds() <= before + len(again)
    for one, other in zip(encoded, again, strict=False):
        assert bytes(readable(one.data)) == bytes(readable(other.data))
    options = {"dtype": "float32", "num_blocks": 60, "max_seq_len": 512, "threads": 1, "enable_block_reuse": False}
    process = EngineProcess(EmbeddedConfig(model=str(folder), device="cpu", **options))  # type: ignore[arg-type]
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    try:
        await client.start()
        assert client._shares
        answers = []
        for images in (encoded, [replace(image, data=bytes(readable(image.data))) for image in encoded], encoded[::-1]):
            answers.append(await said(client, images))
        assert answers[0] == answers[1] != answers[2]
        client._shares = False  # a host elsewhere
        assert await said(client, encoded) == answers[0]
        with pytest.raises(InvalidRequest, match="bytes of embeddings"):
            async for _ in client.generate(request_of(SharedBytes.of(CONTENT))):
                pass
    finally:
        await client.close()
        await process.close()
