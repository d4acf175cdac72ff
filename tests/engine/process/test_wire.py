"""Messages between processes are encoded and decoded without a loss."""

import asyncio
import time
from collections.abc import Callable

import msgspec
import pytest
import zmq
import zmq.asyncio

import engine.errors
from engine.errors import EngineError, EngineFailure, InvalidRequest
from engine.media import Encoding, MediaFiles, MediaInput, MediaSpan, MediaSpans, PromptMedia
from engine.process import wire
from engine.process.sockets import Buffer, LoopSocket
from engine.transfer.shared_bytes import SharedBytes
from engine.types import GenerateRequest, SamplingParams
from protocol.internal import PrefillRequest, head_of, parts_of, pieces

ERRORS = [value for value in vars(engine.errors).values() if isinstance(value, type) and issubclass(value, EngineError)]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_keeps_its_type(cls: type[EngineError]) -> None:
    sent = cls("message", "field") if issubclass(cls, InvalidRequest) else cls("message")
    batch = wire.decode_replies(wire.encode(wire.Replies(1, [wire.failed(7, sent)])))
    report = batch.replies[0]
    assert isinstance(report, wire.Failed)
    received = wire.error_of(report)
    assert type(received) is cls and str(received) == "message"
    assert getattr(received, "param", None) == getattr(sent, "param", None)


def test_an_error_of_another_version_is_a_failure() -> None:
    error = wire.error_of(wire.Failed(1, "NewKind", "message", None))
    assert type(error) is EngineFailure and str(error) == "message"


def spans(count: int) -> MediaSpans:
    return MediaSpans(
        tuple(
            MediaSpan(
                key=f"{index:064}", start=2 * index, length=1, rows=1, dtype="float32", data=bytes([200 + index]) * 40
            )
            for index in range(count)
        )
    )


def request_with(media: PromptMedia | None) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=1)
    return GenerateRequest(request_id="r", prompt_token_ids=(1,) * 9, sampling=sampling, media=media)


FILES = MediaFiles("a", (MediaInput(b"file 0"), MediaInput(b"file 1", "low")))
ELSEWHERE = Encoding(version=1, backend="trtllm", prompt="a", state=b"state")
REQUESTS = [request_with(media) for media in (None, ELSEWHERE, FILES, spans(1), spans(3))]


def packed(requests: list[GenerateRequest]) -> list[Buffer]:
    """A batch of calls that take these requests, as frames."""
    commands, frames = [], []
    for key, request in enumerate(requests):
        bare, parts = request.detach()
        command, behind = wire.call(key, "generate", wire.encode(bare), parts, False)
        commands.append(command)
        frames += behind
    return [wire.encode(wire.Commands(7, [*commands, wire.Cancel(1)])), *frames]


def test_requests_come_with_their_images() -> None:
    frames = packed(REQUESTS)
    generation, commands = wire.unpack(frames)  # type: ignore[arg-type] # as ZMQ hands them out, they are bytes
    found = [
        msgspec.msgpack.decode(command.argument, type=GenerateRequest).attach(wire.parts_of(command, parts))
        for command, parts in commands
        if isinstance(command, wire.Call)
    ]
    assert generation == 7 and found == REQUESTS and commands[-1] == (wire.Cancel(1), [])
    data = [part for request in REQUESTS for part in request.media_data()]
    assert not any(part in frames[0] for part in data), "the message itself has none of their bytes"
    assert all(any(part is frame for frame in frames) for part in data), "they are the same objects: nothing is copied"


@pytest.mark.parametrize(
    "change", [lambda frames: frames[:-1], lambda frames: [*frames, b"more"], lambda frames: frames[1:]]
)
def test_frames_that_do_not_belong_together_are_refused(change: Callable[[list[Buffer]], list[bytes]]) -> None:
    with pytest.raises(ValueError):
        wire.unpack(change(packed([REQUESTS[-1]])))


def test_references_to_parts_that_do_not_exist_are_refused() -> None:
    memory = SharedBytes.of(b"1")
    command = wire.Call(1, "generate", msgspec.Raw(b""), 1, {7: memory.reference})
    with pytest.raises(ValueError, match="belongs to no part"):
        wire.parts_of(command, [])


_heads = msgspec.msgpack.Decoder(PrefillRequest)


@pytest.mark.parametrize("request_", REQUESTS)
def test_bodies_between_replicas_keep_the_images(request_: GenerateRequest) -> None:
    bare, parts = request_.detach()
    body = b"".join(
        pieces(PrefillRequest(1, "m", msgspec.Raw(msgspec.msgpack.encode(bare)), [*map(len, parts)]), parts)
    )
    head, rest = head_of(body, _heads)
    assert msgspec.msgpack.decode(head.request, type=GenerateRequest).attach(parts_of(rest, head.sizes)) == request_
    for wrong in (b"", body[:3], body[:40], body[4:], b"\xff" * 100):
        with pytest.raises(ValueError):
            parts_of(head_of(wrong, _heads)[1], head.sizes)
    for sizes in ([*head.sizes, 1], [-1, *head.sizes, 1]):
        with pytest.raises(ValueError, match="its parts"):
            parts_of(rest, sizes)


async def test_large_frames_are_sent_as_they_are() -> None:
    sender = zmq.Context.instance().socket(zmq.PAIR)
    receiver = zmq.asyncio.Context.instance().socket(zmq.PAIR)
    sender.connect(f"tcp://127.0.0.1:{receiver.bind_to_random_port('tcp://127.0.0.1')}")
    link = LoopSocket(sender, lambda frames: None)
    try:
        data = bytes(128 << 20)
        began = time.thread_time()
        assert len(bytearray(data)) == len(data)
        copied = time.thread_time()
        link.send([b"head", data])
        assert time.thread_time() - copied < (copied - began) / 2, "a copy takes longer"
        assert await asyncio.wait_for(receiver.recv_multipart(), 20) == [b"head", data]
    finally:
        link.close()
        receiver.close(linger=0)
