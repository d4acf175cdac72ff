"""Frames on a byte stream: read exactly, bounded, and never taken for something else."""

import io

import msgspec
import pytest

from protocol import frames
from protocol.frames import HEADER_BYTES, frame, packed, read_payload, receive_payload, size_of


async def test_packed_messages_are_read_again() -> None:
    messages = [{"a": 1}, [], "text" * 10_000, None]
    stream = io.BytesIO(b"".join(map(packed, messages)))
    assert [msgspec.msgpack.decode(read_payload(stream.read)) for _ in messages] == messages
    stream.seek(0)

    async def read(size: int) -> bytes:
        return stream.read(size)

    assert [msgspec.msgpack.decode(await receive_payload(read)) for _ in messages] == messages


def test_a_header_tells_size_and_failure() -> None:
    assert size_of(frame(b"12345")[:HEADER_BYTES]) == (5, False)
    assert size_of(frame(b"12345", failed=True)[:HEADER_BYTES]) == (5, True)
    assert frame(b"12345", failed=True)[HEADER_BYTES:] == b"12345"


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a frame of 5 bytes; the maximum is 4"):
        size_of(frame(b"12345")[:HEADER_BYTES], 4)
    with pytest.raises(ValueError, match="the maximum is 1073741824"):
        read_payload(io.BytesIO(b"\x7f\xff\xff\xff").read)
    monkeypatch.setattr(frames, "_FAILED", 1 << 10)
    with pytest.raises(ValueError, match="cannot hold 1024 bytes"):
        frame(bytes(1 << 10))
