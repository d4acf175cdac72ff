"""The codec of handoffs between replicas: msgpack, versioned, bounded. Nothing is ever unpickled."""

from typing import TypeVar

import msgspec

from engine.errors import InvalidRequest
from engine.types import Delta, EngineInfo, Handoff, Held
from protocol import internal

VERSION = 1
MAX_BYTES = 64 << 20

T = TypeVar("T")

encode = msgspec.msgpack.Encoder().encode
_handoffs = msgspec.msgpack.Decoder(Handoff)


def handoff_of(backend: str, first: Delta) -> Handoff:
    """Return the handoff that a delta of a `prefill_only` request makes."""
    held = first.held or Held(b"")
    first = msgspec.structs.replace(first, held=None)
    return Handoff(
        version=VERSION,
        backend=backend,
        first=first,
        state=held.state,
        computed=held.computed,
        prompt_token_ids=held.prompt_token_ids,
    )


def prefill_info(model_name: str, info: EngineInfo) -> internal.PrefillInfo:
    """Return the facts that replicas must share for handoffs between them."""
    return internal.PrefillInfo(
        internal.VERSION,
        model_name,
        info.backend,
        info.dtype,
        info.block_size,
        info.tensor_parallel_size,
        info.kv_layout,
    )


def decode_handoff(data: bytes) -> Handoff:
    """Decode a handoff. Raises InvalidRequest for bytes that are no handoff of this version."""
    handoff = decode_bounded(_handoffs, data, MAX_BYTES, "handoff", "handoff")
    check_version(handoff.version, "handoff")
    return handoff


def check_version(version: int, what: str) -> None:
    """Raise InvalidRequest for another version than this one."""
    if version != VERSION:
        raise InvalidRequest(f"the {what} has version {version}; this replica reads version {VERSION}", what)


def decode_bounded(decoder: "msgspec.msgpack.Decoder[T]", data: bytes, most: int, what: str, param: str) -> T:
    """Decode msgpack of another replica. Raises InvalidRequest for more than `most` bytes or a malformed message."""
    if len(data) > most:
        raise InvalidRequest(f"the {what} has {len(data)} bytes; the most is {most}", param)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the {what} cannot be read: {error}", param) from error
