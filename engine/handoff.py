"""The codec of what replicas hand to each other: msgpack, versioned, bounded. Nothing is ever unpickled."""

from typing import TypeVar

import msgspec

from engine.errors import InvalidRequest
from engine.media import Encoding
from engine.types import Delta, EngineInfo, Handoff
from protocol import internal

VERSION = 1
MAX_BYTES = 64 << 20

T = TypeVar("T")
V = TypeVar("V", Handoff, Encoding)

encode = msgspec.msgpack.Encoder().encode
_handoffs = msgspec.msgpack.Decoder(Handoff)
_encodings = msgspec.msgpack.Decoder(Encoding)


def handoff_of(backend: str, first: Delta) -> Handoff:
    """What the only delta of a `prefill_only` request comes to."""
    held, first = first.held, msgspec.structs.replace(first, held=None)
    if held is None:
        return Handoff(version=VERSION, backend=backend, first=first)
    return Handoff(
        version=VERSION, backend=backend, first=first, state=held.state, prompt_token_ids=held.prompt_token_ids
    )


def prefill_info(model_name: str, info: EngineInfo) -> internal.PrefillInfo:
    """What replicas have to have in common to hand over from one to the other."""
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
    """Raises InvalidRequest for what is no handoff of this version."""
    return _checked(_handoffs, data, "handoff")


def decode_encoding(data: bytes) -> Encoding:
    """Raises InvalidRequest for what is no encoding of this version."""
    return _checked(_encodings, data, "encoding")


def decode_bounded(decoder: "msgspec.msgpack.Decoder[T]", data: bytes, most: int, what: str, param: str) -> T:
    """msgpack of another replica. Raises InvalidRequest for more than `most` bytes, and for what the decoder does not know."""
    if len(data) > most:
        raise InvalidRequest(f"the {what} has {len(data)} bytes; the most is {most}", param)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the {what} cannot be read: {error}", param) from error


def _checked(decoder: "msgspec.msgpack.Decoder[V]", data: bytes, name: str) -> V:
    value = decode_bounded(decoder, data, MAX_BYTES, name, name)
    if value.version != VERSION:
        raise InvalidRequest(f"the {name} has version {value.version}; this replica reads version {VERSION}", name)
    return value
