"""Description of the KV blocks that one replica holds for another, and how the other checks and uses it: nothing is
trusted."""

from collections import abc
from pathlib import Path

import msgspec
from blake3 import blake3

from engine.embedded.kv.groups import Table
from engine.embedded.kv.memory import KvMemory
from engine.errors import EngineUnavailable, InvalidRequest
from engine.kit.handoff import decode_bounded
from engine.transfer.base import LeaseWord, Offer, Read
from engine.types import GenerateRequest, Handoff, Held

BACKEND = "embedded"
MAX_STATE_BYTES = 8 << 20
"""Enough for a table with more than a million blocks."""
_PARAM = "handoff"
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file of weights


class Layout(msgspec.Struct, frozen=True):
    """Properties that two replicas must share so that one can use the other's KV blocks."""

    model: str
    """Hash of config.json and of samples of the weights: two fine-tunes of one model differ in all of them."""
    vocab_size: int
    layers: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Sliding window of each group of layers; None for full attention."""
    dtype: str
    """Type of keys and values."""
    form: str
    """The order of values in a block."""
    block_size: int
    block_bytes: tuple[int, ...]
    """Bytes of a block, for each group."""

    def __str__(self) -> str:
        windows = "/".join("full" if window is None else str(window) for window in self.windows)
        shape = f"{self.layers} layers of {self.kv_heads}x{self.head_dim}"
        blocks = f"blocks of {self.block_size} tokens"
        return f"model {self.model}, {shape}, {self.dtype}, {self.form}, {blocks}, windows {windows}"


_NAMES = {
    "model": "model",
    "vocab_size": "vocabulary",
    "layers": "number of layers",
    "kv_heads": "number of key-value heads",
    "head_dim": "size of heads",
    "windows": "attention windows",
    "dtype": "KV cache type",
    "form": "KV cache layout",
    "block_size": "block size",
    "block_bytes": "bytes of a block",
}


class HeldState(msgspec.Struct, frozen=True, array_like=True):
    """A held prompt's blocks, and how to read them: `Held.state` as msgpack."""

    layout: Layout
    tables: tuple[tuple[int, ...], ...]
    """The prompt's blocks in each group, GONE behind the window."""
    offers: tuple[Offer, ...]
    lease: LeaseWord


encode_state = msgspec.msgpack.Encoder().encode
_states = msgspec.msgpack.Decoder(HeldState)


def layout_of(folder: str, vocab_size: int, block_size: int, memory: KvMemory) -> Layout:
    attends = memory.attends
    return Layout(
        model=_identity(Path(folder)),
        vocab_size=vocab_size,
        layers=len(attends.windows),
        kv_heads=attends.kv_heads,
        head_dim=attends.head_dim,
        windows=tuple(attends.groups),
        dtype=memory.dtype,
        form=memory.form,
        block_size=block_size,
        block_bytes=memory.block_bytes,
    )


def _identity(folder: Path) -> str:
    digest = blake3((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            for part in range(_SAMPLES):
                file.seek(size * part // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def held_of(layout: Layout, tables: abc.Sequence[Table], offers: tuple[Offer, ...], lease: LeaseWord) -> Held:
    """Return the description of a held prompt's blocks."""
    return Held(encode_state(HeldState(layout, tuple(map(tuple, tables)), offers, lease)))


def check_early(request: GenerateRequest, handoff: Handoff) -> None:
    """Raise InvalidRequest for an early handoff that cannot be continued."""
    _check_origin(request, handoff)
    if not handoff.state or handoff.computed < 0:
        raise InvalidRequest("an early handoff must have a state, and a number of computed tokens", _PARAM)


def check_handoff(request: GenerateRequest, handoff: Handoff, layout: Layout) -> int:
    """Return the first token of the output. Raises InvalidRequest for a handoff that cannot be continued."""
    _check_origin(request, handoff)
    first = handoff.first
    if first.finish_reason is not None or len(first.token_ids) != 1 or request.sampling.max_tokens < 2:
        raise InvalidRequest("the handoff must have one token, and some must be left to generate", _PARAM)
    if not 0 <= first.token_ids[0] < layout.vocab_size:
        raise InvalidRequest(f"the handoff's token id must be from 0 to {layout.vocab_size - 1}", _PARAM)
    return first.token_ids[0]


def _check_origin(request: GenerateRequest, handoff: Handoff) -> None:
    if handoff.backend != BACKEND:
        raise InvalidRequest(f"the handoff is of engine {handoff.backend}; this one is {BACKEND}", _PARAM)
    if handoff.prompt_token_ids not in ((), request.prompt_token_ids):
        raise InvalidRequest("the handoff is of another prompt", _PARAM)


def reads_of(state: HeldState, tables: abc.Sequence[Table], missing: abc.Sequence[abc.Sequence[int]]) -> list[Read]:
    """Return the reads that fill the blocks at the indices `missing`, by group, of a sequence's tables."""
    return [
        Read(group, state.tables[group][index] * size, tables[group][index] * size, size)
        for group, size in enumerate(state.layout.block_bytes)
        for index in missing[group]
    ]


def decode_state(data: bytes, layout: Layout, num_prompt: int) -> HeldState:
    state = decode_bounded(_states, data, MAX_STATE_BYTES, "handoff's state", _PARAM)
    here, there = msgspec.structs.asdict(layout), msgspec.structs.asdict(state.layout)
    if different := [name for name in here if here[name] != there[name]]:
        values = (f"{_NAMES[name]} {here[name]} here, {there[name]} on the prefill replica" for name in different)
        raise EngineUnavailable("the prefill replica's KV blocks do not fit: " + "; ".join(values))
    _check_tables(state, num_prompt)
    return state


def _check_tables(state: HeldState, num_prompt: int) -> None:
    layout = state.layout
    if len(state.tables) != len(layout.windows):
        raise InvalidRequest(f"the handoff's state must have tables for {len(layout.windows)} groups of layers", _PARAM)
    expected = -(-num_prompt // layout.block_size)
    for table in state.tables:
        if len(table) != expected:
            raise InvalidRequest(f"the handoff's state has {len(table)} blocks for a prompt of {expected}", _PARAM)
