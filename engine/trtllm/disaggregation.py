"""Converts `DisaggregatedParams` to and from the handoffs and encodings of our replicas."""

import dataclasses
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from engine.errors import EngineFailure, EngineUnavailable, InvalidRequest
from engine.kit.handoff import VERSION
from engine.media import Encoding, PromptMedia, Unexpanded
from engine.transfer.process_id import shared_memory_domain
from engine.trtllm.versions import PackageVersion
from engine.types import Delta, GenerateRequest, Handoff, Held

BACKEND = "trtllm"
FIRST_REQUEST_ID = 1 << 42
"""Request ids from here on are global: a package's own ids stay below (`llmapi/disagg_utils.py`)."""
T = TypeVar("T")

Scores = list[tuple[int, float, int | None]] | float
"""Log-probabilities at one position: token id, value and rank of each, or the value of the token alone."""


class ContextState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a context worker's DisaggregatedParams, in 1.2.1 and main.

    Neither the embeddings' handles are among them, which were used up there and which a generation worker refuses, nor
    logits, which are not asked for.
    """

    package: str
    """Version of TensorRT-LLM that the state is of. No other one is known to read it."""
    ctx_request_id: int
    first_gen_tokens: list[int]
    first_gen_log_probs: list[Scores] | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None
    ctx_usage: dict[str, Any] | None = None
    conversation_id: str | None = None
    multimodal_hashes: list[list[int]] | None = None
    multimodal_item_runs: list[list[tuple[int, int, list[int]]]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None
    memory: str = ""
    """Shared memory in which the handles lie."""
    others: dict[str, Any] = {}
    """Fields by names that are not known here."""


class EncoderState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The encoder's result for a prompt's media. A handle is the dict of a shared tensor, to be opened exactly once."""

    multimodal_embedding_handles: list[dict[str, Any]]
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None
    memory: str = ""
    """Shared memory in which the handles lie."""


_USED_UP = frozenset(("request_type", "multimodal_embedding_handles", "first_gen_logits"))
_OURS = frozenset(("package", "memory", "others"))
_KNOWN = frozenset(ContextState.__struct_fields__) - _OURS


def context_keywords(media: PromptMedia | None, version: PackageVersion) -> dict[str, Any]:
    """Return keywords of DisaggregatedParams for a prefill. Raises InvalidRequest."""
    keywords = {"request_type": "context_only", **_encoded(media)}
    if version.request_ids:
        keywords["disagg_request_id"] = FIRST_REQUEST_ID + secrets.randbelow((1 << 63) - FIRST_REQUEST_ID)
    return keywords


def generation_keywords(
    handoff: Handoff, version: PackageVersion, logprob: Callable[[float, int | None], Any]
) -> dict[str, Any]:
    """Return keywords of DisaggregatedParams for a decode. `logprob` makes TensorRT-LLM's object of a log-probability.

    Raises InvalidRequest.
    """
    state = _decoded(handoff, ContextState)
    if state.package != version.name:
        raise InvalidRequest(
            f"the handoff is of TensorRT-LLM {state.package}; this replica runs {version.name}", "handoff"
        )
    if wrong := sorted(state.others.keys() & (_USED_UP | _KNOWN)):
        raise InvalidRequest(f"the handoff cannot be read: {', '.join(wrong)} is not one of its fields", "handoff")
    if state.mrope_position_ids_handle is not None and state.memory != shared_memory_domain():
        raise InvalidRequest(
            "the handoff's positions (mRoPE) lie in memory of the prefill replica's host, which this replica does not "
            "share: models with mRoPE need prefill and decode on one host, and containers --ipc=host",
            "handoff",
        )
    keywords = {"request_type": "generation_only"} | _fields(state) | state.others
    if state.first_gen_log_probs is not None:
        keywords["first_gen_log_probs"] = [
            entry if isinstance(entry, float) else {token: logprob(value, rank) for token, value, rank in entry}
            for entry in state.first_gen_log_probs
        ]
    return keywords


def recomputed(request: GenerateRequest) -> GenerateRequest:
    """Return a plain request that goes on after a handoff's tokens without its state. Raises InvalidRequest.

    The tokens become part of the prompt, so the engine's presence and frequency penalties no longer count them.
    """
    assert request.handoff is not None
    if request.sampling.guide is not None or request.handoff.prompt_token_ids:
        what = "a guide" if request.sampling.guide is not None else "images"
        raise InvalidRequest(f"the handoff's KV blocks are needed: a request with {what} cannot go on alone", "handoff")
    first = request.handoff.first.token_ids
    sampling = msgspec.structs.replace(
        request.sampling,
        max_tokens=request.sampling.max_tokens - len(first),
        min_tokens=max(0, request.sampling.min_tokens - len(first)),
        prompt_logprobs=None,
    )
    prompt = (*request.prompt_token_ids, *first)
    return msgspec.structs.replace(request, prompt_token_ids=prompt, sampling=sampling, handoff=None)


def local_keywords(encoding: Encoding) -> dict[str, Any]:
    """Return keywords of DisaggregatedParams for a request that only has its images encoded elsewhere.

    Raises InvalidRequest.
    """
    return {"request_type": "context_and_generation", **_encoded(encoding)}


def held_of(result: Any, delta: Delta, request: GenerateRequest, version: PackageVersion) -> Delta:
    """Return `delta`, the only one of a context-only result, with the state that it keeps for decode.

    Its one token, though the last that was allowed, does not end the request. Raises EngineFailure.
    """
    if delta.finish_reason == "stop":
        return delta
    params = result.outputs[0].disaggregated_params
    if params is None or params.ctx_request_id is None or not params.first_gen_tokens:
        raise EngineFailure(
            "the engine computed the prompt but handed nothing over: is cache_transceiver_config.backend set?"
        )
    values = {
        field.name: getattr(params, field.name)
        for field in dataclasses.fields(params)
        if field.init and field.name not in _USED_UP
    }
    others = {name: value for name, value in values.items() if name not in _KNOWN and value is not None}
    known = {name: value for name, value in values.items() if name in _KNOWN}
    if scores := known.get("first_gen_log_probs"):
        known["first_gen_log_probs"] = [
            [(token, item.logprob, item.rank) for token, item in entry.items()] if isinstance(entry, dict) else entry
            for entry in scores
        ]
    try:
        state = msgspec.msgpack.encode(
            ContextState(version.name, **known, memory=shared_memory_domain(), others=others)
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineFailure(f"TensorRT-LLM {version.name} hands over what cannot be sent: {error}") from error
    held = Held(state, tuple(result.prompt_token_ids) if isinstance(request.media, Unexpanded) else ())
    return msgspec.structs.replace(delta, finish_reason=None, held=held)


def encoding_of(result: Any, prompt: str) -> Encoding:
    """Return the encoding in an encoder's result.

    The result's own parameters have a handle for each image; those of `outputs` are filled too early. Without either,
    `mm_embedding_handle` is the only handle. Raises EngineFailure.
    """
    params = result.disaggregated_params
    values = {} if params is None else _values(params, EncoderState)
    handles = values.get("multimodal_embedding_handles")
    if isinstance(handles, tuple):  # 1.2.1 wraps the list in a tuple when the request had parameters of its own
        handles = handles[0]
    if not handles and result.mm_embedding_handle is not None:
        handles = [result.mm_embedding_handle]
    if not handles:
        raise EngineFailure("the encoder returned no embeddings")
    hashes = values.get("multimodal_hashes")
    if hashes is not None and len(hashes) != len(handles):
        values["multimodal_hashes"] = None  # images share a handle: 1.2.1 takes a hash for each handle, or none
    state = EncoderState(**{**values, "multimodal_embedding_handles": handles, "memory": shared_memory_domain()})
    return Encoding(version=VERSION, backend=BACKEND, prompt=prompt, state=msgspec.msgpack.encode(state))


def _encoded(media: PromptMedia | None) -> dict[str, Any]:
    """Return encoded media. Raises EngineUnavailable if the embeddings cannot be read here: another replica may share
    the memory."""
    if not isinstance(media, Encoding):
        return {}
    state = _decoded(media, EncoderState)
    if state.memory != shared_memory_domain():
        raise EngineUnavailable(
            "the embeddings of the images lie in memory of the encode replica's host, which this replica does not "
            "share: they need one host, and containers --ipc=host"
        )
    return _fields(state)


def _values(params: Any, state: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: getattr(params, name) for name in state.__struct_fields__ if name not in _OURS}


def _decoded(source: Handoff | Encoding, state: type[T]) -> T:
    name = type(source).__name__.lower()
    if source.backend != BACKEND:
        raise InvalidRequest(f"the {name} is of the {source.backend} engine; this replica runs {BACKEND}", name)
    try:
        return msgspec.msgpack.decode(source.state, type=state)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the {name} cannot be read: {error}", name) from error


def _fields(state: msgspec.Struct) -> dict[str, Any]:
    values = msgspec.structs.asdict(state).items()
    return {name: value for name, value in values if value is not None and name not in _OURS}
